// Composite ops that in ATen would make a plain tensor from sizes and combine it with DTensors. Here the new tensor is
// a DTensor. They are composite too, so they can be differentiated again.

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_ctc_loss.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/ctc_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/istft_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/max_pool1d_with_indices.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stft_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/ranges.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "dtensor/dispatch/dispatch_scopes.h"
#include "dtensor/dispatch/implicit_replication.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/local/redistribute.h"
#include "dtensor/ops/composite/composite_constants.h"
#include "dtensor/ops/read_numbers.h"

namespace tessera {

namespace {

/// Computes the gradient of max.dim, min.dim, median.dim, mode, kthvalue, sort, topk: each value's gradient goes to its
/// index.
at::Tensor value_selecting_reduction_backward(const at::Tensor& grad, int64_t dim, const at::Tensor& indices,
                                              c10::SymIntArrayRef sizes, bool keepdim) {
  const bool add_dim = !keepdim && !sizes.empty();
  const auto source = add_dim ? grad.unsqueeze(dim) : grad;
  const auto index = add_dim ? indices.unsqueeze(dim) : indices;
  return grad.new_zeros_symint(sizes).scatter(dim, index, source);
}

/// Computes the gradient of cummax and cummin, where adjacent positions may select the same element.
at::Tensor cummaxmin_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& indices, int64_t dim) {
  return grad.new_zeros_symint(input.sym_sizes()).scatter_add(dim, indices, grad);
}

at::Tensor trace_backward(const at::Tensor& grad, c10::SymIntArrayRef sizes) {
  const auto zeros = grad.new_zeros_symint(sizes);
  return zeros.diagonal_scatter(grad.expand({std::min(zeros.size(0), zeros.size(1))}));
}

at::Tensor masked_select_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mask) {
  return grad.new_zeros(at::infer_size(input.sizes(), mask.sizes())).masked_scatter(mask, grad);
}

/// Returns 0, 1, ... along `dim` of `self`, with size 1 in other dims, sharded like `self`.
at::Tensor indices_along(const at::Tensor& self, int64_t dim) {
  const auto& meta = *dtensor_meta(self);
  std::vector<int64_t> sizes(static_cast<size_t>(self.dim()), 1);
  sizes[static_cast<size_t>(dim)] = self.size(dim);
  auto placements = meta.spec->placements();
  for (auto& placement : placements) {
    placement = placement.is_shard(dim) ? placement : Placement(Replicate());
  }
  const auto indices = at::arange(self.size(dim), meta.local.options().dtype(at::kLong)).view(sizes);
  return redistribute(replicated(indices, meta.spec->mesh()), placements);
}

/// Returns the diagonal of a tall matrix that restarts one row after its end: every (width + 1)st element.
at::Tensor wrapped_diagonal(const at::Tensor& self) {
  const int64_t width = self.size(1);
  return (indices_along(self, 0) * width + indices_along(self, 1)).remainder(width + 1).eq(0);
}

at::Tensor main_diagonal(const at::Tensor& self) {
  const auto first = indices_along(self, 0);
  auto mask = first.eq(indices_along(self, 1));
  for (int64_t dim = 2; dim < self.dim(); ++dim) {
    mask = mask.logical_and(first.eq(indices_along(self, dim)));
  }
  return mask;
}

/// Replaces ATen's, which writes to a strided view that a shard does not have.
at::Tensor& fill_diagonal_(at::Tensor& self, const at::Scalar& value, bool wrap) {
  TESSERA_CHECK(ValueError, self.dim() >= 2, "aten::fill_diagonal_: [{}] has no diagonal; 2 dims are needed",
                fmt::join(self.sizes(), ", "));
  const auto differs = [&](int64_t size) { return size != self.size(0); };
  TESSERA_CHECK(ValueError, self.dim() == 2 || std::ranges::none_of(self.sizes(), differs),
                "aten::fill_diagonal_: [{}]; more than 2 dims need equal sizes", fmt::join(self.sizes(), ", "));
  const bool wraps = wrap && self.dim() == 2 && self.size(0) > self.size(1) + 1;
  return self.masked_fill_(wraps ? wrapped_diagonal(self) : main_diagonal(self), value);
}

/// Replaces ATen's, which writes into plain zeros. On the CPU it reads the values too, so that all ranks reject the
/// same.
at::Tensor one_hot(const at::Tensor& self, int64_t num_classes) {
  TESSERA_CHECK(ValueError, self.scalar_type() == at::kLong, "aten::one_hot: classes are Long, not {}",
                toString(self.scalar_type()));
  TESSERA_CHECK(ValueError, num_classes > 0 || (num_classes == -1 && self.numel() > 0),
                "aten::one_hot: {} classes for {} elements; give their number", num_classes, self.numel());
  if (self.numel() > 0 && (num_classes == -1 || self.is_cpu())) {
    const auto [low, high] = at::aminmax(self);
    const auto least = low.item<int64_t>(), largest = high.item<int64_t>();
    num_classes = num_classes == -1 ? largest + 1 : num_classes;
    TESSERA_CHECK(ValueError, least >= 0 && largest < num_classes, "aten::one_hot: classes from {} to {}, of {}", least,
                  largest, num_classes);
  }
  const auto classes = at::arange(num_classes, self.options());
  return self.unsqueeze(-1).eq(replicated(classes, dtensor_meta(self)->spec->mesh())).to(at::kLong);
}

/// Reads lengths, which are needed as numbers and are few.
std::vector<int64_t> length_numbers(const at::Tensor& lengths) {
  TESSERA_CHECK(ValueError, c10::isIntegralType(lengths.scalar_type(), /*includeBool=*/false),
                "aten::ctc_loss: lengths are integers, not {}", toString(lengths.scalar_type()));
  return read_numbers<int64_t>(lengths);
}

/// Replaces ATen's mean, which divides by a plain tensor of lengths.
at::Tensor ctc_loss(const at::Tensor& log_probs, const at::Tensor& targets, at::IntArrayRef input_lengths,
                    at::IntArrayRef target_lengths, int64_t blank, int64_t reduction, bool zero_infinity) {
  const bool is_batch = log_probs.dim() == 3;
  auto losses = std::get<0>(at::_ctc_loss(is_batch ? log_probs : log_probs.unsqueeze(1), targets.to(at::kLong),
                                          input_lengths, target_lengths, blank, zero_infinity));
  if (zero_infinity) {
    losses = at::where(losses.isinf(), at::zeros_like(losses), losses);
  }
  if (reduction == at::Reduction::Mean) {
    auto lengths = at::tensor(target_lengths, losses.options()).clamp_min(1);
    const auto* meta = dtensor_meta(losses);
    return losses.div(meta ? replicated(lengths, meta->spec->mesh()) : lengths).mean();
  }
  return reduction == at::Reduction::Sum ? losses.sum() : is_batch ? losses : losses.squeeze(0);
}

at::Tensor ctc_loss_of_tensors(const at::Tensor& log_probs, const at::Tensor& targets, const at::Tensor& input_lengths,
                               const at::Tensor& target_lengths, int64_t blank, int64_t reduction, bool zero_infinity) {
  return at::ctc_loss(log_probs, targets, length_numbers(input_lengths), length_numbers(target_lengths), blank,
                      reduction, zero_infinity);
}

/// Replaces ATen's, which uses a kernel that reads memory if no gradient is needed.
at::Tensor max_pool1d(const at::Tensor& self, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode) {
  return std::get<0>(at::max_pool1d_with_indices(self, kernel_size, stride, padding, dilation, ceil_mode));
}

bool has_window(const std::optional<at::Tensor>& window) {
  return window && window->defined();
}

/// Rejects a plain window, which may differ between ranks.
void check_window(const char* op, const at::Tensor& self, const std::optional<at::Tensor>& window) {
  TESSERA_CHECK(ValueError,
                !dtensor_meta(self) || !has_window(window) || dtensor_meta(*window) || ImplicitReplication::active(),
                "{}: the window is a plain tensor, and the input is a DTensor. Make it one with "
                "distribute_tensor(window, mesh, {{Replicate()}}), or declare plain tensors equal on all ranks with an "
                "ImplicitReplication scope",
                op);
}

at::Tensor window_of_ones(int64_t length, const DTensorMeta& input) {
  const auto dtype = c10::toRealValueType(input.spec->dtype());
  return replicated(at::ones({length}, input.local.options().dtype(dtype)), input.spec->mesh());
}

/// Replaces ATen's, which writes a short window, or ones, into plain zeros.
at::Tensor stft(const at::Tensor& self, int64_t n_fft, std::optional<int64_t> hop_length,
                std::optional<int64_t> win_length, const std::optional<at::Tensor>& window, bool center,
                std::string_view pad_mode, bool normalized, std::optional<bool> onesided,
                std::optional<bool> return_complex, std::optional<bool> align_to_window) {
  check_window("aten::stft", self, window);
  const auto* meta = dtensor_meta(self);
  const int64_t length = win_length.value_or(n_fft);
  auto given = window;
  const bool fits = !has_window(window) || window->sizes() == at::IntArrayRef{length};
  if (meta && fits && length > 0 && length < n_fft && !align_to_window.value_or(false)) {
    const int64_t left = (n_fft - length) / 2;
    given = at::constant_pad_nd(has_window(window) ? *window : window_of_ones(length, *meta),
                                {left, n_fft - length - left});
    win_length = n_fft;
  }
  return at::compositeimplicitautograd::stft(self, n_fft, hop_length, win_length, given, center, pad_mode, normalized,
                                             onesided, return_complex, align_to_window);
}

/// Replaces ATen's, which makes a plain window if none is given.
at::Tensor istft(const at::Tensor& self, int64_t n_fft, std::optional<int64_t> hop_length,
                 std::optional<int64_t> win_length, const std::optional<at::Tensor>& window, bool center,
                 bool normalized, std::optional<bool> onesided, std::optional<int64_t> length, bool return_complex) {
  check_window("aten::istft", self, window);
  auto given = window;
  if (const auto* meta = dtensor_meta(self); meta && !has_window(window)) {
    const auto dtype = return_complex ? self.scalar_type() : c10::toRealValueType(self.scalar_type());
    given = replicated(at::ones({win_length.value_or(n_fft)}, meta->local.options().dtype(dtype)), meta->spec->mesh());
  }
  return at::compositeimplicitautograd::istft(self, n_fft, hop_length, win_length, given, center, normalized, onesided,
                                              length, return_complex);
}

void check_features(const char* name, const std::optional<at::Tensor>& tensor, int64_t features) {
  TESSERA_CHECK(ValueError, !tensor || !tensor->defined() || tensor->numel() == features,
                "aten::batch_norm: {} has {} elements, and the input {} channels", name, tensor->numel(), features);
}

/// Returns the same tensor with a separate version counter. In training, autograd saves running statistics and
/// tolerates the norm's write of them, which a plain tensor does not count. A DTensor made by from_local would count
/// it, because it shares its local tensor's counter.
std::optional<at::Tensor> not_counting(const std::optional<at::Tensor>& statistics) {
  if (!statistics || !statistics->defined() || statistics->is_inference() || !dtensor_meta(*statistics)) {
    return statistics;
  }
  return at::Tensor(statistics->unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(/*version=*/0),
                                                                               /*allow_tensor_metadata_change=*/false));
}

/// Replaces ATen's, which calls cuDNN for CUDA tensors, whose ops have no rules.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, int64_t> batch_norm_impl_index(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var, bool training,
    double momentum, double eps, bool /*cudnn_enabled*/) {
  const int64_t features = input.size(1);
  check_features("running_mean", running_mean, features);
  check_features("running_var", running_var, features);
  check_features("weight", weight, features);
  check_features("bias", bias, features);
  if (input.numel() == 0) {  // like ATen: a gradient of zeros, and statistics are unchanged
    auto output = input.clone();
    output = weight && weight->defined() && features > 0 ? output * weight->select(0, 0) : output;
    output = bias && bias->defined() && features > 0 ? output + bias->select(0, 0) : output;
    const auto unused = at::empty({0}, at::kByte);
    return {output, unused, unused, unused, 0};
  }
  const auto own_mean = training ? not_counting(running_mean) : running_mean;
  const auto own_var = training ? not_counting(running_var) : running_var;
  auto [output, mean, inverse_deviation] =
      at::native_batch_norm(input, weight, bias, own_mean, own_var, training, momentum, eps);
  return {output, mean, inverse_deviation, at::empty({0}, at::kByte), 0};
}

void override_composites(torch::Library& library) {
  library.impl("_batch_norm_impl_index", &batch_norm_impl_index);
  library.impl("value_selecting_reduction_backward", &value_selecting_reduction_backward);
  library.impl("cummaxmin_backward", &cummaxmin_backward);
  library.impl("masked_select_backward", &masked_select_backward);
  library.impl("stft.center", &stft);
  library.impl("istft", &istft);
  library.impl("max_pool1d", &max_pool1d);
  library.impl("one_hot", &one_hot);
  library.impl("ctc_loss.IntList", &ctc_loss);
  library.impl("ctc_loss.Tensor", &ctc_loss_of_tensors);
  library.impl("trace_backward", &trace_backward);
  library.impl("fill_diagonal_", &fill_diagonal_);
  override_with_own_constants(library);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  override_composites(library);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  override_composites(library);
}

}  // namespace tessera
