#pragma once
// reshard_after_forward = int: between forward and backward each rank keeps a share of the unit's full parameters, cut
// among a few neighbours, so that the gather for backward stays among them. With 8 ranks and 2 neighbours a rank keeps
// half of the parameters in place of an eighth, and backward's all-gather runs over pairs.

#include <memory>

#include "device_mesh/device_mesh.h"

namespace tessera {

/// The group of this rank and its neighbours along `axis`: ranks [0, size), [size, 2 size), ... of the axis, whose size
/// is a multiple of `size`. Units of one mesh share it while one of them holds it on every rank. Collective over the
/// mesh.
std::shared_ptr<const ProcessGroupPtr> post_forward_group(const DeviceMesh& mesh, int64_t axis, int64_t size);

}  // namespace tessera
