#pragma once
// Which rank holds which part of a DTensor, as a table in text or as a picture.
//
//   fmt::print("{}\n", describe(x));
//     DTensor Float[5, 3] (Shard(0)) on DeviceMesh(cpu, {dp: 2}), local [3, 3]
//   fmt::print("{}", visualize_sharding(x));
//                     dim 1 0:3
//     dim 0 0:3       0
//     dim 0 3:5       1
//
// After torch/distributed/tensor/debug/_visualize_sharding.py.

#include <string>
#include <vector>

#include "dtensor/dtensor.h"

namespace tessera {

/// A part of a tensor of up to two dims, and the ranks that hold it. Along an axis with a pending reduction all of its
/// ranks hold a term of the part.
struct ShardCell {
  DimRange rows;  // of dim 0; [0, 1) if the tensor has none
  DimRange columns;
  std::vector<int64_t> ranks;  // of the default group, ascending
  bool operator==(const ShardCell&) const = default;
};

/// "DTensor Float[5, 3] (Shard(0)) on DeviceMesh(cpu, {dp: 2}), local [3, 3]"; for a plain tensor "Float[5, 3]".
std::string describe(const at::Tensor& tensor);

/// The non-empty parts, by rows and then columns. No communication: every rank gets the same.
/// Throws ValueError if `tensor` is not a DTensor or has more than two dims.
std::vector<ShardCell> shard_cells(const at::Tensor& tensor);

/// The parts as a table: a line for each range of dim 0, a column for each range of dim 1. Errors as shard_cells.
std::string visualize_sharding(const at::Tensor& tensor);

/// The parts as an SVG picture, to scale. Errors as shard_cells.
std::string visualize_sharding_svg(const at::Tensor& tensor);

}  // namespace tessera
