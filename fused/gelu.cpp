#include "fused/gelu.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "fused/cpu/gate_kernels.h"
#include "fused/fused_ops.h"
#include "fused/gradients_of_ops.h"

namespace tessera {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const fused::GateKernels& gelu_kernels_of_cpu() {
  return fused::for_this_cpu([](auto set) -> const fused::GateKernels& { return fused::gate_kernels(set); });
}

/// Calls the kernel; `grad` and `up` may be undefined.
at::Tensor run_gelu(const at::Tensor& grad, const at::Tensor& x) {
  const auto rows = x.contiguous(), grads = grad.defined() ? grad.contiguous() : at::Tensor();
  auto out = at::empty(x.sizes(), x.options());
  const fused::GateOperands of{.dtype = x.scalar_type(),
                               .activation = fused::Activated::TanhGelu,
                               .grad = grad.defined() ? grads.const_data_ptr() : nullptr,
                               .gate = rows.const_data_ptr(),
                               .up = nullptr,
                               .out = grad.defined() ? nullptr : out.mutable_data_ptr(),
                               .grad_gate = grad.defined() ? out.mutable_data_ptr() : nullptr,
                               .grad_up = nullptr};
  const auto& kernels = gelu_kernels_of_cpu();
  const auto kernel = grad.defined() ? kernels.activate_backward : kernels.activate;
  at::parallel_for(0, out.numel(), fused::kElementsOfThread,
                   [&](int64_t begin, int64_t end) { kernel(of, begin, end); });
  return out;
}

at::Tensor tanh_gelu_cpu(const at::Tensor& x) {
  return run_gelu({}, x);
}

at::Tensor tanh_gelu_backward_cpu(const at::Tensor& grad, const at::Tensor& x) {
  return run_gelu(grad, x);
}

at::Tensor tanh_gelu_meta(const at::Tensor& x) {
  return at::empty(x.sizes(), x.options());
}

at::Tensor tanh_gelu_backward_meta(const at::Tensor& /*grad*/, const at::Tensor& x) {
  return at::empty(x.sizes(), x.options());
}

at::Tensor call_tanh_gelu(const at::Tensor& x) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("tessera::tanh_gelu", "").typed<decltype(tanh_gelu_cpu)>();
  return op.call(x);
}

at::Tensor call_tanh_gelu_backward(const at::Tensor& grad, const at::Tensor& x) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tessera::tanh_gelu_backward", "")
                             .typed<decltype(tanh_gelu_backward_cpu)>();
  return op.call(grad, x);
}

class TanhGelu : public torch::autograd::Function<TanhGelu> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    const at::AutoDispatchBelowAutograd below;
    context->save_for_backward({x});
    return call_tanh_gelu(x);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    if (at::GradMode::is_enabled()) {
      return fused::gradients_of_ops(saved, grads,
                                     [](const variable_list& x) -> variable_list { return {at::gelu(x[0], "tanh")}; });
    }
    return {call_tanh_gelu_backward(grads[0], saved[0])};
  }
};

at::Tensor tanh_gelu_autograd(const at::Tensor& x) {
  return TanhGelu::apply(x);
}

}  // namespace

at::Tensor tanh_gelu(const at::Tensor& x) {
  return fused::takes_kernels(x) && x.device().is_cpu() ? call_tanh_gelu(x) : at::gelu(x, "tanh");
}

}  // namespace tessera

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  library.def("tanh_gelu(Tensor x) -> Tensor");
  library.def("tanh_gelu_backward(Tensor grad, Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(tessera, CPU, library) {
  library.impl("tanh_gelu", &tessera::tanh_gelu_cpu);
  library.impl("tanh_gelu_backward", &tessera::tanh_gelu_backward_cpu);
}

TORCH_LIBRARY_IMPL(tessera, Meta, library) {
  library.impl("tanh_gelu", &tessera::tanh_gelu_meta);
  library.impl("tanh_gelu_backward", &tessera::tanh_gelu_backward_meta);
}

TORCH_LIBRARY_IMPL(tessera, Autograd, library) {
  library.impl("tanh_gelu", &tessera::tanh_gelu_autograd);
}
