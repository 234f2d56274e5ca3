#pragma once
// Inputs of checkpointed regions.

#include <ATen/ops/randn.h>

#include "testing/run_ranks.h"

namespace tessera {

/// The same for the same seed and sizes; requires a gradient.
inline at::Tensor leaf(uint64_t seed, at::IntArrayRef sizes) {
  return at::randn(sizes, make_generator(seed)).requires_grad_();
}

}  // namespace tessera
