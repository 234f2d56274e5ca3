// Gradients whose ATen formula writes into plain tensors, or creates some, which DTensors reject. These formulas do
// without.

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_matrix_exp.h>
#include <ATen/ops/mvlgamma.h>
#include <ATen/ops/native_layer_norm_backward_ops.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <numbers>
#include <optional>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "dtensor/factories.h"
#include "dtensor/local/dtensor_impl.h"

namespace tessera {

namespace {

at::Tensor reversed_cumsum(const at::Tensor& tensor, int64_t dim) {
  return tensor.flip(dim).cumsum(dim).flip(dim);
}

/// Computes for each element the products of all others up to each position: quadratic, and differentiable.
at::Tensor cumprod_backward_in_pairs(const at::Tensor& grad, const at::Tensor& input, int64_t dim) {
  const int64_t size = input.size(dim);
  const auto ones = at::ones_like(input.narrow(dim, 0, 1));
  std::vector<at::Tensor> grads;
  for (int64_t k = 0; k < size; ++k) {
    const auto before = k == 0 ? ones : input.narrow(dim, 0, k).prod(dim, /*keepdim=*/true);
    auto without_k = before;
    if (k + 1 < size) {
      without_k = at::cat({before, before * input.narrow(dim, k + 1, size - k - 1).cumprod(dim)}, dim);
    }
    grads.push_back((grad.narrow(dim, k, size - k) * without_k.conj()).sum(dim, /*keepdim=*/true));
  }
  return at::cat(grads, dim);
}

/// Before a row's first zero, uses sums of output x gradient over the input; at the zero, products without it, up to
/// the second zero; after that, nothing.
at::Tensor cumprod_backward_in_one_pass(const at::Tensor& grad, const at::Tensor& input, int64_t dim,
                                        const at::Tensor& output) {
  const auto is_zero = input.eq(0);
  const auto zeros_so_far = is_zero.cumsum(dim);
  const auto is_before = zeros_so_far.eq(0);
  const auto is_first_zero = is_zero.logical_and(zeros_so_far.eq(1));
  const auto is_between = zeros_so_far.eq(1);  // including the first zero
  const auto nonzero = input.masked_fill(is_zero, 1);
  const auto terms = (output.conj() * grad).masked_fill(is_before.logical_not(), 0);
  const auto before = reversed_cumsum(terms, dim).div(nonzero.conj());
  const auto product_before = nonzero.masked_fill(is_before.logical_not(), 1).prod(dim, /*keepdim=*/true);
  const auto products = product_before * nonzero.masked_fill(is_between.logical_not(), 1).cumprod(dim);
  const auto at_zero = (products.conj() * grad.masked_fill(is_between.logical_not(), 0)).sum(dim, /*keepdim=*/true);
  const auto none = at::zeros_like(grad);
  return at::where(is_first_zero, at_zero, none) + at::where(is_before, before, none);
}

at::Tensor cumprod_backward(const at::Tensor& grad, const at::Tensor& input, int64_t dim, const at::Tensor& output) {
  if (input.dim() == 0 || input.numel() == 0 || input.size(dim) == 1) {
    return grad;
  }
  return at::GradMode::is_enabled() ? cumprod_backward_in_pairs(grad, input, dim)
                                    : cumprod_backward_in_one_pass(grad, input, dim, output);
}

/// Computes the sum of ATen's kernel, whose gradient adds a plain vector.
at::Tensor mvlgamma(const at::Tensor& self, int64_t p) {
  if (!at::GradMode::is_enabled() || !self.requires_grad()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return at::mvlgamma(self, p);
  }
  TESSERA_CHECK(ValueError, p >= 1, "aten::mvlgamma: p {}; it is at least 1", p);
  auto result = self.lgamma();
  for (int64_t i = 1; i < p; ++i) {
    result = result + (self - 0.5 * static_cast<double>(i)).lgamma();
  }
  return result + 0.25 * static_cast<double>(p * (p - 1)) * std::log(std::numbers::pi);
}

/// Replaces ATen's gradient, which puts the matrix and the gradient into plain zeros.
class MatrixExp : public torch::autograd::Function<MatrixExp> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& self) {
    context->save_for_backward({self});
    const at::AutoDispatchBelowADInplaceOrView below;
    return at::linalg_matrix_exp(self);
  }

  /// The upper right block of the exponential of [A G; 0 A] is the derivative at A in the direction G (Al-Mohy and
  /// Higham, 2009). The gradient is the derivative at the adjoint of A.
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto adjoint = context->get_saved_variables()[0].mH();
    const int64_t size = adjoint.size(-1);
    const auto upper = at::cat({adjoint, grads[0]}, -1);
    const auto lower = at::cat({at::zeros_like(adjoint), adjoint}, -1);
    return {at::linalg_matrix_exp(at::cat({upper, lower}, -2)).narrow(-2, 0, size).narrow(-1, size, size)};
  }
};

at::Tensor matrix_exp(const at::Tensor& self) {
  return MatrixExp::apply(self);
}

using LayerNormBackward = at::_ops::native_layer_norm_backward;
using LayerNormGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// Replaces ATen's gradient, which multiplies by a plain 1 if there is no weight.
LayerNormGradients native_layer_norm_backward(c10::DispatchKeySet keys, const at::Tensor& grad, const at::Tensor& input,
                                              c10::SymIntArrayRef normalized_shape, const at::Tensor& mean,
                                              const at::Tensor& rstd, const std::optional<at::Tensor>& weight,
                                              const std::optional<at::Tensor>& bias, std::array<bool, 3> wanted) {
  const auto stock = keys.remove(c10::DispatchKey::AutogradPrivateUse1).add(c10::DispatchKey::AutogradOther);
  auto factor = weight;
  const auto* meta = dtensor_meta(input);
  if (at::GradMode::is_enabled() && meta && !(weight && weight->defined())) {
    const auto& mesh = meta->spec->mesh();
    factor = ones(C10_AS_INTARRAYREF_SLOW(normalized_shape), mesh,
                  Placements(static_cast<size_t>(mesh.ndim()), Replicate()), at::TensorOptions(input.scalar_type()));
  }
  return LayerNormBackward::redispatch(stock, grad, input, normalized_shape, mean, rstd, factor, bias, wanted);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("cumprod_backward", &cumprod_backward);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("cumprod_backward", &cumprod_backward);
  library.impl("linalg_matrix_exp", &matrix_exp);
  library.impl("mvlgamma", &mvlgamma);
  library.impl("native_layer_norm_backward", &native_layer_norm_backward);
}

}  // namespace tessera
