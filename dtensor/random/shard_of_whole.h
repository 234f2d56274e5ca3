#pragma once
// Location of a rank's local elements in the whole tensor's memory.

#include <optional>

#include "cuda/draw_request.h"
#include "dtensor/spec/dtensor_spec.h"

namespace tessera {

/// Returns the location of a local tensor with these strides under `spec`. Returns nullopt for Partial, or if the
/// spec's strides leave gaps or overlap.
std::optional<ShardOfWhole> shard_of_whole(const DTensorSpec& spec, at::IntArrayRef local_strides);

}  // namespace tessera
