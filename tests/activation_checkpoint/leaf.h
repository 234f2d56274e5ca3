#pragma once
// Inputs of checkpointed regions.

#include <ATen/ops/randn.h>

#include "testing/run_ranks.h"

namespace tessera {

/// Makes a tensor that requires a gradient; equal seeds and sizes give equal values.
inline at::Tensor leaf(uint64_t seed, at::IntArrayRef sizes) {
  return at::randn(sizes, make_generator(seed)).requires_grad_();
}

}  // namespace tessera
