#pragma once
// Converts between a DTensor's local tensors and the full tensor, below autograd.

#include "dtensor/local/dtensor_impl.h"

namespace tessera {

/// Returns the full tensor; `meta.local` itself if that is full. All ranks must call it.
at::Tensor gather_full(const DTensorMeta& meta);

/// Returns this rank's shard under `spec` of `whole`, which is equal on all ranks; `whole` itself if replicated. Does
/// not communicate.
at::Tensor local_shard_of(const at::Tensor& whole, const DTensorSpec& spec);

}  // namespace tessera
