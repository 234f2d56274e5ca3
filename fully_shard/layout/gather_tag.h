#pragma once
// The tag that a rank sends behind its flat shard: which unit it gathers, and whether it can go on (all_gather.h).

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

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

/// A tag is so many elements: the unit's number in digits, and the fault.
inline constexpr int64_t kUnitDigits = 6;
inline constexpr int64_t kTagNumel = kUnitDigits + 1;
/// Below it are a tree's numbers of units.
inline constexpr int64_t kMaxUnits = int64_t{1} << 18;

struct GatherTag {
  int64_t unit = 0;  // its number in the tree
  ShardFault fault = ShardFault::None;
  bool operator==(const GatherTag&) const = default;
};

/// Writes the tag behind the parameters of `flat_shard`, on the CPU; it is not read elsewhere. Zeros are GatherTag().
void write_tag(const at::Tensor& flat_shard, const GatherTag& tag);

/// The tag that write_tag() wrote to the first elements of `from`, on the CPU.
GatherTag read_tag(const at::Tensor& from);

/// Throws StateError, beginning with `api`, where the tree of `label` has more units than tags can tell apart: with
/// numbers that are cut off, ranks that gather different units would not be told so.
void check_unit_count(size_t units, const std::string& api, const std::string& label);

}  // namespace tessera
