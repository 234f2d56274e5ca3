#include "nn/rms_norm.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/rms_norm.h>
#include <c10/core/GradMode.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "fused/rms_norm.h"

namespace tessera::nn {

namespace {

/// Returns the epsilon of the dtype in which the norm is computed, like ATen.
double machine_epsilon(at::ScalarType dtype) {
  return dtype == at::kDouble ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
}

}  // namespace

RMSNormImpl::RMSNormImpl(RMSNormOptions options_) : options(std::move(options_)) {
  const auto& shape = options.normalized_shape();
  TESSERA_CHECK(ValueError, !shape.empty() && std::ranges::all_of(shape, [](int64_t size) { return size > 0; }),
                "RMSNorm: normalized_shape is [{}]; give the sizes of the input's last dims, each at least 1",
                fmt::join(shape, ", "));
  RMSNormImpl::reset();
}

void RMSNormImpl::reset() {
  if (options.elementwise_affine()) {
    weight = register_parameter("weight", at::ones(options.normalized_shape()));
  } else {
    weight = register_parameter("weight", at::Tensor(), /*requires_grad=*/false);
  }
}

void RMSNormImpl::reset_parameters() {
  const c10::NoGradGuard no_grad;
  if (weight.defined()) weight.fill_(1);
}

void RMSNormImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format("tessera::nn::RMSNorm([{}], eps={}, elementwise_affine={})",
                        fmt::join(options.normalized_shape(), ", "),
                        options.eps() ? fmt::format("{}", *options.eps()) : "none", options.elementwise_affine());
}

at::Tensor RMSNormImpl::forward(const at::Tensor& input) {
  if (options.fused() && weight.defined() && weight.dim() == 1) {
    return tessera::rms_norm(input, weight, {.eps = options.eps().value_or(machine_epsilon(input.scalar_type()))});
  }
  return at::rms_norm(input, options.normalized_shape(),
                      weight.defined() ? std::optional<at::Tensor>(weight) : std::nullopt, options.eps());
}

}  // namespace tessera::nn
