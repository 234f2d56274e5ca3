#pragma once
// Data parallelism (dp) on top of tensor parallelism (tp), for parameters that are already DTensors on the tp axis.
//
//   mesh {dp: 2, tp: 2}; a weight [5, 4] under (Shard(0)) on mesh["tp"]: tp 0 has rows 0 to 2, tp 1 rows 3 and 4
//   fully_shard(module, {.mesh = mesh["dp"]}):
//
//     unsharded   (Shard(0)) on {tp: 2}                        on dp 1, tp 0: rows 0 to 2, as before
//     sharded     (Shard(0, 1), Shard(0)) on {dp: 2, tp: 2}    on dp 1, tp 0: row 2
//
// tp shards first, then dp shards this rank's part. A unit therefore gathers only over dp, with sizes that depend on
// the tp rank.

#include "device_mesh/device_mesh.h"
#include "dtensor/spec/dtensor_spec.h"
#include "dtensor/spec/placement.h"

namespace tessera {

/// Combines placements: dp's axes first, with tp's shards of a dim ordered before dp's: (Shard(0)), (Shard(0)) →
/// (Shard(0, 1), Shard(0)).
Placements stacked_placements(const Placements& dp, const Placements& tp);

/// Returns why no mesh has the axes of both, or "" if there is one.
std::string why_not_stacked(const DeviceMesh& dp, const DeviceMesh& tp);

/// Returns the mesh with the axes of `dp`, then those of `tp`, which must exist.
DeviceMesh stacked_mesh(const DeviceMesh& dp, const DeviceMesh& tp);

/// Returns the row-major spec of `tp` with the additional `placements` on `dp`.
SpecPtr stacked_spec(const DeviceMesh& dp, const Placements& placements, const DTensorSpec& tp);

}  // namespace tessera
