// Composite ops of ATen that would make a plain tensor from sizes and mix it with DTensors, written so that the
// new tensor is a DTensor. They are composite here too, so they can be differentiated again.

#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/native_batch_norm.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include "dtensor/dispatch.h"
#include "dtensor/dtensor_impl.h"

namespace tessera {

namespace {

/// The gradient of max.dim, min.dim, median.dim, mode, kthvalue, sort, topk: each value's gradient goes to its index.
at::Tensor value_selecting_reduction_backward(const at::Tensor& grad, int64_t dim, const at::Tensor& indices,
                                              c10::SymIntArrayRef sizes, bool keepdim) {
  const bool add_dim = !keepdim && !sizes.empty();
  const auto source = add_dim ? grad.unsqueeze(dim) : grad;
  const auto index = add_dim ? indices.unsqueeze(dim) : indices;
  return grad.new_zeros_symint(sizes).scatter(dim, index, source);
}

at::Tensor masked_select_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mask) {
  return grad.new_zeros(at::infer_size(input.sizes(), mask.sizes())).masked_scatter(mask, grad);
}

/// Autograd makes plain zeros for the gradient of index_put, the same on every rank: in a backward they count as
/// replicated.
at::Tensor index_put(const at::Tensor& self, const c10::List<std::optional<at::Tensor>>& indices,
                     const at::Tensor& values, bool accumulate) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::index_put", "");
  const auto* meta = dtensor_meta(self);
  auto placed = values;
  if (meta && !dtensor_meta(values) && torch::autograd::get_current_graph_task_id() != -1) {
    const Placements replicated(meta->spec->placements().size(), Replicate());
    placed = wrap_local(values, DTensorSpec::make(meta->spec->mesh(), replicated, TensorMeta::of(values)));
  }
  torch::jit::Stack stack{self, indices, placed, accumulate};
  dispatch(op, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), &stack);
  return stack.back().toTensor();
}

/// For CUDA tensors ATen's own calls cuDNN, whose ops have no rules.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, int64_t> batch_norm_impl_index(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var, bool training,
    double momentum, double eps, bool /*cudnn_enabled*/) {
  auto [output, mean, inverse_deviation] =
      at::native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps);
  return {output, mean, inverse_deviation, at::empty({0}, at::kByte), 0};
}

void override_composites(torch::Library& library) {
  library.impl("_batch_norm_impl_index", &batch_norm_impl_index);
  library.impl("value_selecting_reduction_backward", &value_selecting_reduction_backward);
  library.impl("masked_select_backward", &masked_select_backward);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  override_composites(library);
  library.impl("index_put", &index_put);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  override_composites(library);
}

}  // namespace tessera
