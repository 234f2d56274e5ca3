#include "fused/rms_norm.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "fused/cpu/norm_kernels.h"
#include "fused/fused_ops.h"
#include "fused/gradients_of_ops.h"

namespace tessera {

namespace {

using NormAndRstd = std::tuple<at::Tensor, at::Tensor>;
using SumNormRstd = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using NormGradients = std::tuple<at::Tensor, at::Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::ScalarType wide_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor rms_norm_of_ops(const at::Tensor& x, const at::Tensor& weight, double eps, double weight_offset) {
  if (weight_offset == 0) {
    return at::rms_norm(x, weight.sizes(), weight, eps);
  }
  const auto wide = wide_dtype(x.scalar_type());
  return at::rms_norm(x.to(wide), weight.sizes(), weight_offset + weight.to(wide), eps).to(x.scalar_type());
}

at::Tensor empty_like_rows(const at::Tensor& x) {
  return at::empty(x.sizes(), x.options());
}

at::Tensor empty_rstd(const at::Tensor& x) {
  auto sizes = x.sizes().vec();
  sizes.back() = 1;
  return at::empty(sizes, x.options().dtype(wide_dtype(x.scalar_type())));
}

// CPU kernels.

const fused::NormKernels& norm_kernels_of_cpu() {
  return fused::for_this_cpu([](auto set) -> const fused::NormKernels& { return fused::norm_kernels(set); });
}

int64_t rows_of(const at::Tensor& x) {
  return x.numel() / std::max<int64_t>(1, x.size(-1));
}

SumNormRstd norm_rows(const at::Tensor& x, const at::Tensor* residual, const at::Tensor& weight, double eps,
                      double weight_offset) {
  const auto rows = x.contiguous(), weights = weight.contiguous();
  const auto residuals = residual ? residual->contiguous() : at::Tensor();
  auto sum = residual ? empty_like_rows(x) : at::Tensor(), normed = empty_like_rows(x), rstd = empty_rstd(x);
  const fused::NormOperands of{.dtype = x.scalar_type(),
                               .features = x.size(-1),
                               .eps = eps,
                               .weight_offset = weight_offset,
                               .x = rows.const_data_ptr(),
                               .residual = residual ? residuals.const_data_ptr() : nullptr,
                               .weight = weights.const_data_ptr(),
                               .sum = residual ? sum.mutable_data_ptr() : nullptr,
                               .normed = normed.mutable_data_ptr(),
                               .rstd = rstd.mutable_data_ptr()};
  const int64_t grain = std::max<int64_t>(1, fused::kElementsOfThread / std::max<int64_t>(1, of.features));
  at::parallel_for(0, rows_of(x), grain,
                   [&](int64_t begin, int64_t end) { norm_kernels_of_cpu().forward(of, begin, end); });
  return {sum, normed, rstd};
}

NormAndRstd rms_norm_cpu(const at::Tensor& x, const at::Tensor& weight, double eps, double weight_offset) {
  auto [sum, normed, rstd] = norm_rows(x, nullptr, weight, eps, weight_offset);
  return {normed, rstd};
}

SumNormRstd add_rms_norm_cpu(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, double eps,
                             double weight_offset) {
  return norm_rows(x, &residual, weight, eps, weight_offset);
}

/// Computes one term of the weight's gradient per group of rows, independently of the number of threads.
NormGradients rms_norm_backward_cpu(const at::Tensor& grad, const std::optional<at::Tensor>& grad_sum,
                                    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& rstd,
                                    double weight_offset, bool needs_weight) {
  constexpr int64_t kMostTerms = 64, kLeastRows = 16;
  const auto grads = grad.contiguous(), values = x.contiguous(), weights = weight.contiguous(),
             scales = rstd.contiguous();
  const auto grad_sums = grad_sum ? grad_sum->contiguous() : at::Tensor();
  auto grad_x = empty_like_rows(x);
  const int64_t rows = rows_of(x), rows_of_term = std::max(kLeastRows, (rows + kMostTerms - 1) / kMostTerms);
  const int64_t terms = (rows + rows_of_term - 1) / rows_of_term;
  const auto grad_weights = needs_weight ? at::zeros({terms, x.size(-1)}, rstd.options()) : at::Tensor();
  const fused::NormBackwardOperands of{.dtype = x.scalar_type(),
                                       .features = x.size(-1),
                                       .weight_offset = weight_offset,
                                       .grad = grads.const_data_ptr(),
                                       .grad_sum = grad_sum ? grad_sums.const_data_ptr() : nullptr,
                                       .x = values.const_data_ptr(),
                                       .weight = weights.const_data_ptr(),
                                       .rstd = scales.const_data_ptr(),
                                       .grad_x = grad_x.mutable_data_ptr()};
  at::parallel_for(0, terms, 1, [&](int64_t begin, int64_t end) {
    for (int64_t term = begin; term < end; ++term) {
      void* const of_weight = needs_weight ? static_cast<char*>(grad_weights.mutable_data_ptr()) +
                                                 term * of.features * static_cast<int64_t>(rstd.element_size())
                                           : nullptr;
      norm_kernels_of_cpu().backward(of, term * rows_of_term, std::min(rows, (term + 1) * rows_of_term), of_weight);
    }
  });
  return {grad_x, needs_weight ? grad_weights.sum(0).to(weight.scalar_type()) : at::Tensor()};
}

// Meta functions: results without data.

NormAndRstd rms_norm_meta(const at::Tensor& x, const at::Tensor& /*weight*/, double /*eps*/, double /*weight_offset*/) {
  return {empty_like_rows(x), empty_rstd(x)};
}

SumNormRstd add_rms_norm_meta(const at::Tensor& x, const at::Tensor& /*residual*/, const at::Tensor& /*weight*/,
                              double /*eps*/, double /*weight_offset*/) {
  return {empty_like_rows(x), empty_like_rows(x), empty_rstd(x)};
}

NormGradients rms_norm_backward_meta(const at::Tensor& /*grad*/, const std::optional<at::Tensor>& /*grad_sum*/,
                                     const at::Tensor& x, const at::Tensor& weight, const at::Tensor& /*rstd*/,
                                     double /*weight_offset*/, bool needs_weight) {
  return {empty_like_rows(x), needs_weight ? at::empty(weight.sizes(), weight.options()) : at::Tensor()};
}

// Calls through the dispatcher.

template <class Signature>
auto find_norm_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

NormAndRstd call_rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, double weight_offset) {
  static const auto op = find_norm_op<decltype(rms_norm_cpu)>("tessera::rms_norm");
  return op.call(x, weight, eps, weight_offset);
}

SumNormRstd call_add_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, double eps,
                              double weight_offset) {
  static const auto op = find_norm_op<decltype(add_rms_norm_cpu)>("tessera::add_rms_norm");
  return op.call(x, residual, weight, eps, weight_offset);
}

/// Returns the gradients of the normalized tensor, to which `grad_sum` is added if defined, and of the weight.
variable_list norm_gradients(const at::Tensor& grad, const at::Tensor& grad_sum, const variable_list& saved,
                             double weight_offset, bool needs_weight) {
  static const auto op = find_norm_op<decltype(rms_norm_backward_cpu)>("tessera::rms_norm_backward");
  const auto [grad_x, grad_weight] = op.call(grad, grad_sum.defined() ? std::optional(grad_sum) : std::nullopt,
                                             saved[0], saved[1], saved[2], weight_offset, needs_weight);
  return {grad_x, grad_weight};
}

/// Does the same with ATen's ops, including their graph.
variable_list differentiable_norm_gradients(const at::Tensor& grad, const at::Tensor& grad_sum,
                                            const variable_list& saved, double eps, double weight_offset) {
  auto results = fused::gradients_of_ops({saved[0], saved[1]}, {grad}, [&](const variable_list& x) -> variable_list {
    return {rms_norm_of_ops(x[0], x[1], eps, weight_offset)};
  });
  if (results[0].defined() && grad_sum.defined()) {
    results[0] = results[0] + grad_sum;
  }
  return results;
}

class RmsNormFunction : public torch::autograd::Function<RmsNormFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, double eps,
                               double weight_offset) {
    const at::AutoDispatchBelowAutograd below;
    auto [normed, rstd] = call_rms_norm(x, weight, eps, weight_offset);
    context->save_for_backward({x, weight, rstd});
    context->mark_non_differentiable({rstd});
    context->saved_data["eps"] = eps;
    context->saved_data["weight_offset"] = weight_offset;
    return {normed, rstd};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const double eps = context->saved_data["eps"].toDouble(), offset = context->saved_data["weight_offset"].toDouble();
    variable_list results;
    if (at::GradMode::is_enabled()) {
      results = differentiable_norm_gradients(grads[0], {}, saved, eps, offset);
    } else {
      results = norm_gradients(grads[0], {}, saved, offset, context->needs_input_grad(1));
    }
    results.resize(4);
    return results;
  }
};

class AddRmsNormFunction : public torch::autograd::Function<AddRmsNormFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& residual,
                               const at::Tensor& weight, double eps, double weight_offset) {
    const at::AutoDispatchBelowAutograd below;
    auto [sum, normed, rstd] = call_add_rms_norm(x, residual, weight, eps, weight_offset);
    context->set_materialize_grads(false);
    context->save_for_backward({sum, weight, rstd});
    context->mark_non_differentiable({rstd});
    context->saved_data["eps"] = eps;
    context->saved_data["weight_offset"] = weight_offset;
    return {sum, normed, rstd};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto& grad_sum = grads[0];
    const auto& grad = grads[1];
    if (!grad.defined()) {
      return {grad_sum, grad_sum, at::Tensor(), at::Tensor(), at::Tensor()};
    }
    const auto saved = context->get_saved_variables();
    const double eps = context->saved_data["eps"].toDouble(), offset = context->saved_data["weight_offset"].toDouble();
    variable_list of_sum;
    if (at::GradMode::is_enabled()) {
      of_sum = differentiable_norm_gradients(grad, grad_sum, saved, eps, offset);
    } else {
      of_sum = norm_gradients(grad, grad_sum, saved, offset, context->needs_input_grad(2));
    }
    return {of_sum[0], of_sum[0], of_sum[1], at::Tensor(), at::Tensor()};
  }
};

NormAndRstd rms_norm_autograd(const at::Tensor& x, const at::Tensor& weight, double eps, double weight_offset) {
  const auto results = RmsNormFunction::apply(x, weight, eps, weight_offset);
  return {results[0], results[1]};
}

SumNormRstd add_rms_norm_autograd(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, double eps,
                                  double weight_offset) {
  const auto results = AddRmsNormFunction::apply(x, residual, weight, eps, weight_offset);
  return {results[0], results[1], results[2]};
}

bool takes_norm_kernels(const at::Tensor& x, const at::Tensor& weight) {
  return fused::takes_kernels(x) && weight.dim() == 1 && x.dim() >= 1 && x.size(-1) == weight.size(0) &&
         x.scalar_type() == weight.scalar_type();
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, const RmsNorm& norm) {
  return takes_norm_kernels(x, weight) ? std::get<0>(call_rms_norm(x, weight, norm.eps, norm.weight_offset))
                                       : rms_norm_of_ops(x, weight, norm.eps, norm.weight_offset);
}

SumAndNorm add_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                        const RmsNorm& norm) {
  if (!takes_norm_kernels(x, weight) || x.sizes() != residual.sizes() || x.scalar_type() != residual.scalar_type()) {
    const auto sum = x + residual;
    return {.sum = sum, .normed = rms_norm(sum, weight, norm)};
  }
  const auto [sum, normed, rstd] = call_add_rms_norm(x, residual, weight, norm.eps, norm.weight_offset);
  return {.sum = sum, .normed = normed};
}

}  // namespace tessera

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps, float weight_offset) -> (Tensor, Tensor)");
  library.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, float weight_offset) -> (Tensor, Tensor, "
      "Tensor)");
  library.def(
      "rms_norm_backward(Tensor grad, Tensor? grad_sum, Tensor x, Tensor weight, Tensor rstd, float weight_offset, "
      "bool needs_weight) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(tessera, CPU, library) {
  library.impl("rms_norm", &tessera::rms_norm_cpu);
  library.impl("add_rms_norm", &tessera::add_rms_norm_cpu);
  library.impl("rms_norm_backward", &tessera::rms_norm_backward_cpu);
}

TORCH_LIBRARY_IMPL(tessera, Meta, library) {
  library.impl("rms_norm", &tessera::rms_norm_meta);
  library.impl("add_rms_norm", &tessera::add_rms_norm_meta);
  library.impl("rms_norm_backward", &tessera::rms_norm_backward_meta);
}

TORCH_LIBRARY_IMPL(tessera, Autograd, library) {
  library.impl("rms_norm", &tessera::rms_norm_autograd);
  library.impl("add_rms_norm", &tessera::add_rms_norm_autograd);
}
