#pragma once
// Shows which ranks hold which elements of a DTensor. Source: torch/distributed/tensor/debug/_visualize_sharding.py.

#include <string>
#include <vector>

#include "dtensor/dtensor.h"

namespace tessera {

/// Block of a tensor of up to two dims, and the ranks that hold it (or a term of it).
struct ShardCell {
  DimRange rows;  // of dim 0; [0, 1) if the tensor has none
  DimRange columns;
  std::vector<int64_t> ranks;  // of the default group, ascending
  bool operator==(const ShardCell&) const = default;
};

std::string describe(const at::Tensor& tensor);  // "DTensor Float[5, 3] (Shard(0)) on ..."; plain: "Float[5, 3]"

/// Returns the non-empty blocks in row-major order. Throws ValueError for a plain tensor or more than two dims.
std::vector<ShardCell> shard_cells(const at::Tensor& tensor);

std::string visualize_sharding(const at::Tensor& tensor);  // table; throws like shard_cells

std::string visualize_sharding_svg(const at::Tensor& tensor);  // picture to scale; throws like shard_cells

}  // namespace tessera
