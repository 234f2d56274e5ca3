#pragma once
// The stamp that a rank sends behind its flat shard: which unit it gathers, and whether it can go on (all_gather.h).

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "fully_shard/layout/param_layout.h"

namespace tessera {

/// Elements of a flat buffer that is gathered: the flat shard and the stamp.
inline int64_t gather_numel(const ParamLayout& layout) {
  return layout.shard_numel + kSlotAlignment;
}

/// What is wrong with a rank's shards.
enum class GatherFault : uint8_t {
  None,
  Replaced,
  OnMeta,
  Changed,       // since the forward whose backward is about to use them
  MaybeChanged,  // the same, of a gather ahead of that backward: whether this rank's loss uses them is not known yet
};
inline constexpr int64_t kGatherFaultCount = 5;

struct Stamp {
  int64_t unit = 0;  // its number in the tree, below 2^12
  GatherFault fault = GatherFault::None;
  bool operator==(const Stamp&) const = default;
};

/// Writes the stamp behind the parameters of `flat_shard`, on the CPU: elsewhere nobody reads it. Zeros are Stamp().
void write_stamp(const at::Tensor& flat_shard, const Stamp& stamp);

/// The stamp whose digits, as write_stamp() wrote them, are the three elements of `digits`, on the CPU.
Stamp read_stamp(const at::Tensor& digits);

}  // namespace tessera
