#pragma once
// Where a rank's local elements lie in the whole tensor's memory.

#include <optional>

#include "cuda/draw_request.h"
#include "dtensor/spec/dtensor_spec.h"

namespace tessera {

/// Of a local tensor of these strides, under `spec`. nullopt where the spec has a Partial, or its strides leave gaps or
/// overlap.
std::optional<ShardOfWhole> shard_of_whole(const DTensorSpec& spec, at::IntArrayRef local_strides);

}  // namespace tessera
