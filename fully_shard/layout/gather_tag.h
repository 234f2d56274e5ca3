#pragma once
// The tag that a rank sends behind its flat shard: which unit it gathers, and whether it can go on (all_gather.h).

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

/// What is wrong with a rank's shards.
enum class ShardFault : uint8_t {
  None,
  Replaced,
  OnMeta,
  Changed,       // since the forward whose backward is about to use them
  MaybeChanged,  // the same, of a gather ahead of that backward: whether this rank's loss uses them is not known yet
};
inline constexpr int64_t kShardFaultCount = 5;

struct GatherTag {
  int64_t unit = 0;  // its number in the tree, below 2^12
  ShardFault fault = ShardFault::None;
  bool operator==(const GatherTag&) const = default;
};

/// Writes the tag behind the parameters of `flat_shard`, on the CPU; it is not read elsewhere. Zeros are GatherTag().
void write_tag(const at::Tensor& flat_shard, const GatherTag& tag);

/// The tag whose digits, as write_tag() wrote them, are the three elements of `digits`, on the CPU.
GatherTag read_tag(const at::Tensor& digits);

}  // namespace tessera
