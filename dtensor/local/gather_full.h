#pragma once
// Between a DTensor's local tensors and the whole tensor that every rank holds, below autograd.

#include "dtensor/local/dtensor_impl.h"

namespace tessera {

/// The whole tensor; `meta.local` itself where that is it. Collective.
at::Tensor gather_full(const DTensorMeta& meta);

/// This rank's part of `whole`, which every rank holds alike, under `spec`; `whole` itself where that is it.
/// No communication.
at::Tensor local_shard_of(const at::Tensor& whole, const DTensorSpec& spec);

}  // namespace tessera
