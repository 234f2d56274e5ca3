#include "testing/fixtures.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/randn.h>

#include "testing/run_ranks.h"

namespace tessera::testing {

namespace {

/// Returns float32 for lower precisions too, so that a loss does not lose the model's precision.
at::ScalarType at_least_float(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace

void fill_parameters(torch::nn::Module& module, uint64_t seed, double scale) {
  const at::NoGradGuard no_grad;
  auto generator = make_generator(seed);
  for (auto& parameter : module.parameters()) {
    parameter.copy_(at::randn(parameter.sizes(), generator, at_least_float(parameter)) * scale);
  }
}

at::Tensor weighted_loss(const at::Tensor& out) {
  const auto weights = at::linspace(0.5, 1.5, out.numel(), at_least_float(out)).view(out.sizes()).to(out.device());
  return (out.square() * weights).mean() + (out * weights).mean();
}

}  // namespace tessera::testing
