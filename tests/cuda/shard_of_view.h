#pragma once
// A view of a dense tensor as a shard of it.

#include <ATen/core/Tensor.h>

#include "cuda/draw_request.h"

namespace tessera::cuda {

/// `part`, a view of `whole`, whose numbers go to memory of these strides.
inline ShardOfWhole shard_of_view(const at::Tensor& part, const at::Tensor& whole, at::IntArrayRef local_strides) {
  return {.sizes = part.sizes().vec(),
          .whole_strides = part.strides().vec(),
          .local_strides = local_strides.vec(),
          .whole_offset = part.storage_offset(),
          .whole_numel = whole.numel()};
}

}  // namespace tessera::cuda
