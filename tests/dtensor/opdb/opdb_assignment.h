#pragma once
// Where the operands of a recorded call lie on the mesh.

#include <map>
#include <string>
#include <vector>

#include "dtensor/dtensor.h"
#include "tests/dtensor/opdb/opdb_corpus.h"

namespace tessera {

struct Assignment {
  /// "R", "0S1" (tensor 0 cut along dim 1), "*S0" (all tensors along dim 0), "0:(Shard(1)) 2:(Partial(Sum))".
  std::string label;
  /// Of tensors by number; the others are replicated.
  std::map<size_t, Placements> placements;
};

/// On a mesh of one axis: all replicated; each tensor cut alone along each of its dims; all tensors that have a dim cut
/// along it. At most 24, single cuts being thinned out evenly.
std::vector<Assignment> assignments(const OpdbCase& test);

/// `count` of them on a mesh of this shape, each tensor anyhow: on each axis cut along a dim, whole, or partial. The
/// same for each case on every machine.
std::vector<Assignment> drawn_assignments(const OpdbCase& test, const std::vector<int64_t>& mesh, int count);

/// `tensor`, the same on every rank, as a DTensor of these placements. Partial values differ from the whole and from
/// each other, and reduce to it without rounding. All ranks call.
at::Tensor place_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, const Placements& placements);

}  // namespace tessera
