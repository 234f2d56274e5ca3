#pragma once
// Data parallelism on top of tensor parallelism: parameters that are DTensors on a tensor-parallel mesh (tp) already
// when fully_shard or replicate takes them for a data-parallel one (dp).
//
//   mesh {dp: 2, tp: 2}; a weight [5, 4] under (Shard(0)) on mesh["tp"]: tp 0 has rows 0 to 2, tp 1 rows 3 and 4
//   fully_shard(module, {.mesh = mesh["dp"]}):
//
//     unsharded   (Shard(0)) on {tp: 2}                        on dp 1, tp 0: rows 0 to 2, as before
//     sharded     (Shard(0, 1), Shard(0)) on {dp: 2, tp: 2}    on dp 1, tp 0: row 2
//
// tp cuts first, whatever the order of the axes in the root mesh; dp cuts, as torch.chunk does, what tp left to this
// rank. So a unit gathers and reduces over dp alone, and each place on tp has a flat buffer of its own sizes.
//
// Thread safety: values.

#include "device_mesh/device_mesh.h"
#include "dtensor/spec/dtensor_spec.h"
#include "dtensor/spec/placement.h"

namespace tessera {

/// Placements on a mesh of dp's axes and then tp's, where tp's cuts of a dim come before dp's:
/// (Shard(0)), (Shard(0)) → (Shard(0, 1), Shard(0)).
Placements stacked_placements(const Placements& dp, const Placements& tp);

/// Why there is no mesh of the axes of both; empty if there is one. Both need one root, and no axis in common.
std::string why_not_stacked(const DeviceMesh& dp, const DeviceMesh& tp);

/// The axes of `dp` and then those of `tp`. Only if there is such a mesh.
DeviceMesh stacked_mesh(const DeviceMesh& dp, const DeviceMesh& tp);

/// What `tp` is under `placements` of `dp` beside its own. Row-major.
SpecPtr stacked_spec(const DeviceMesh& dp, const Placements& placements, const DTensorSpec& tp);

}  // namespace tessera
