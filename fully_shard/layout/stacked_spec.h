#pragma once
// Data parallelism (dp) on top of tensor parallelism (tp): parameters that are DTensors on tp when a unit takes them.
//
//   mesh {dp: 2, tp: 2}; a weight [5, 4] under (Shard(0)) on mesh["tp"]: tp 0 has rows 0 to 2, tp 1 rows 3 and 4
//   fully_shard(module, {.mesh = mesh["dp"]}):
//
//     unsharded   (Shard(0)) on {tp: 2}                        on dp 1, tp 0: rows 0 to 2, as before
//     sharded     (Shard(0, 1), Shard(0)) on {dp: 2, tp: 2}    on dp 1, tp 0: row 2
//
// tp shards first, dp what tp left to this rank. So a unit gathers over dp alone, with its own sizes at each tp rank.

#include "device_mesh/device_mesh.h"
#include "dtensor/spec/dtensor_spec.h"
#include "dtensor/spec/placement.h"

namespace tessera {

/// Places tp's shards of a dim before dp's, on dp's axes and then tp's:
/// (Shard(0)), (Shard(0)) → (Shard(0, 1), Shard(0)).
Placements stacked_placements(const Placements& dp, const Placements& tp);

/// Says why there is no mesh of the axes of both; empty if there is one.
std::string why_not_stacked(const DeviceMesh& dp, const DeviceMesh& tp);

/// Returns the axes of `dp` and then those of `tp`. Only if there is such a mesh.
DeviceMesh stacked_mesh(const DeviceMesh& dp, const DeviceMesh& tp);

/// Adds `placements` of `dp` to `tp`. Row-major.
SpecPtr stacked_spec(const DeviceMesh& dp, const Placements& placements, const DTensorSpec& tp);

}  // namespace tessera
