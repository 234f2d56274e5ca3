#pragma once
// Tag that a rank sends after its flat shard, with the unit that it gathers and any fault (all_gather.h).

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace tessera {

/// Fault of a rank's shards.
enum class ShardFault : uint8_t {
  None,
  Replaced,
  OnMeta,
  Changed,       // since the forward whose backward will use them
  MaybeChanged,  // like Changed, before it is known whether this rank's loss uses them (prefetch)
};
inline constexpr int64_t kShardFaultCount = 5;

/// Digits of the unit's number in a tag. The fault follows them.
inline constexpr int64_t kUnitDigits = 6;
inline constexpr int64_t kTagNumel = kUnitDigits + 1;
/// Exclusive limit of unit numbers in a tree.
inline constexpr int64_t kMaxUnits = int64_t{1} << 18;

struct GatherTag {
  int64_t unit = 0;  // number in the tree
  ShardFault fault = ShardFault::None;
  bool operator==(const GatherTag&) const = default;
};

/// Writes the tag after the parameters of `flat_shard`, on the CPU, the only device where tags are read. GatherTag() is
/// all zeros.
void write_tag(const at::Tensor& flat_shard, const GatherTag& tag);

/// Returns the tag in the first elements of `from`, on the CPU.
GatherTag read_tag(const at::Tensor& from);

/// Throws StateError, beginning with `api`, if the tree of `label` has more units than tags can distinguish. With
/// truncated numbers, gathers of different units could go unnoticed.
void check_unit_count(size_t units, const std::string& api, const std::string& label);

}  // namespace tessera
