// Normalizations on CUDA tensors.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "fused/gpu/launch.h"
#include "fused/gpu/norm_kernels.h"

namespace tessera::fused {

namespace {

/// Returns whether accesses to any row are aligned.
bool rows_are_aligned(int64_t features, std::initializer_list<at::Tensor> tensors) {
  return std::ranges::all_of(tensors, [&](const at::Tensor& tensor) {
    return !tensor.defined() || (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % cuda::kAccessBytes == 0 &&
                                 features * static_cast<int64_t>(tensor.element_size()) % cuda::kAccessBytes == 0);
  });
}

const void* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

int64_t count_rows(const at::Tensor& x) {
  return x.numel() / std::max<int64_t>(1, x.size(-1));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> normalize(const at::Tensor& x, const at::Tensor& residual,
                                                         const at::Tensor& weight, double eps, double weight_offset) {
  const auto rows = x.contiguous(), weights = weight.contiguous();
  const auto residuals = residual.defined() ? residual.contiguous() : at::Tensor();
  const auto sum = residual.defined() ? at::empty(x.sizes(), x.options()) : at::Tensor();
  const auto normed = at::empty(x.sizes(), x.options());
  auto sizes = x.sizes().vec();
  sizes.back() = 1;
  const auto rstd = at::empty(sizes, x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
  launch_on(x, "tessera::rms_norm", [&](cudaStream_t stream) {
    return launch_norm({.rows = count_rows(x),
                        .features = x.size(-1),
                        .eps = eps,
                        .weight_offset = weight_offset,
                        .x = rows.const_data_ptr(),
                        .residual = data_or_null(residuals),
                        .weight = weights.const_data_ptr(),
                        .sum = sum.defined() ? sum.mutable_data_ptr() : nullptr,
                        .normed = normed.mutable_data_ptr(),
                        .rstd = rstd.mutable_data_ptr(),
                        .is_aligned = rows_are_aligned(x.size(-1), {rows, residuals, weights, sum, normed})},
                       kernel_dtype(x), stream);
  });
  return {sum, normed, rstd};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_cuda(const at::Tensor& x, const at::Tensor& weight, double eps,
                                                 double weight_offset) {
  const auto [sum, normed, rstd] = normalize(x, {}, weight, eps, weight_offset);
  return {normed, rstd};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward_cuda(const at::Tensor& grad,
                                                          const std::optional<at::Tensor>& grad_sum,
                                                          const at::Tensor& x, const at::Tensor& weight,
                                                          const at::Tensor& rstd, double weight_offset,
                                                          bool needs_weight) {
  constexpr int64_t kMostTerms = 256, kLeastRows = 32;
  const auto grads = grad.contiguous(), values = x.contiguous(), weights = weight.contiguous(),
             scales = rstd.contiguous();
  const auto grad_sums = grad_sum ? grad_sum->contiguous() : at::Tensor();
  const auto grad_x = at::empty(x.sizes(), x.options());
  const int64_t rows = count_rows(x), rows_of_term = std::max(kLeastRows, cuda::ceil_div(rows, kMostTerms));
  const NormGradientRows of{.rows = rows,
                            .features = x.size(-1),
                            .weight_offset = weight_offset,
                            .grad = grads.const_data_ptr(),
                            .grad_sum = data_or_null(grad_sums),
                            .x = values.const_data_ptr(),
                            .weight = weights.const_data_ptr(),
                            .rstd = scales.const_data_ptr(),
                            .grad_x = grad_x.mutable_data_ptr(),
                            .is_aligned = rows_are_aligned(x.size(-1), {grads, values, weights, grad_sums, grad_x})};
  const auto dtype = kernel_dtype(x);
  launch_on(x, "tessera::rms_norm_backward",
            [&](cudaStream_t stream) { return launch_norm_gradient(of, dtype, stream); });
  if (!needs_weight) {
    return {grad_x, at::Tensor()};
  }
  const auto terms = at::empty({cuda::ceil_div(rows, rows_of_term), x.size(-1)}, scales.options());
  launch_on(x, "tessera::rms_norm_backward", [&](cudaStream_t stream) {
    return launch_weight_gradient(of, rows_of_term, terms.mutable_data_ptr(), dtype, stream);
  });
  return {grad_x, terms.sum(0).to(weight.scalar_type())};
}

}  // namespace

}  // namespace tessera::fused

TORCH_LIBRARY_IMPL(tessera, CUDA, library) {
  library.impl("rms_norm", &tessera::fused::rms_norm_cuda);
  library.impl("add_rms_norm", &tessera::fused::normalize);
  library.impl("rms_norm_backward", &tessera::fused::rms_norm_backward_cuda);
}
