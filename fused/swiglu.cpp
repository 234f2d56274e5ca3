#include "fused/swiglu.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>

#include "fused/cpu/gate_kernels.h"
#include "fused/fused_ops.h"
#include "fused/gradients_of_ops.h"

namespace tessera {

namespace {

using TwoTensors = std::tuple<at::Tensor, at::Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor swiglu_of_ops(const at::Tensor& gate, const at::Tensor& up) {
  return at::silu(gate) * up;
}

at::Tensor empty_as(const at::Tensor& x) {
  return at::empty(x.sizes(), x.options());
}

const fused::GateKernels& cpu_kernels() {
  return fused::for_this_cpu([](auto set) -> const fused::GateKernels& { return fused::gate_kernels(set); });
}

at::Tensor swiglu_cpu(const at::Tensor& gate, const at::Tensor& up) {
  const auto gates = gate.contiguous(), ups = up.contiguous();
  auto out = empty_as(gates);
  const fused::GateOperands of{.dtype = gate.scalar_type(),
                               .grad = nullptr,
                               .gate = gates.const_data_ptr(),
                               .up = ups.const_data_ptr(),
                               .out = out.mutable_data_ptr(),
                               .grad_gate = nullptr,
                               .grad_up = nullptr};
  at::parallel_for(0, out.numel(), fused::kElementsOfThread,
                   [&](int64_t begin, int64_t end) { cpu_kernels().forward(of, begin, end); });
  return out;
}

TwoTensors swiglu_backward_cpu(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up) {
  const auto grads = grad.contiguous(), gates = gate.contiguous(), ups = up.contiguous();
  auto grad_gate = empty_as(gates), grad_up = empty_as(gates);
  const fused::GateOperands of{.dtype = gate.scalar_type(),
                               .grad = grads.const_data_ptr(),
                               .gate = gates.const_data_ptr(),
                               .up = ups.const_data_ptr(),
                               .out = nullptr,
                               .grad_gate = grad_gate.mutable_data_ptr(),
                               .grad_up = grad_up.mutable_data_ptr()};
  at::parallel_for(0, gate.numel(), fused::kElementsOfThread,
                   [&](int64_t begin, int64_t end) { cpu_kernels().backward(of, begin, end); });
  return {grad_gate, grad_up};
}

at::Tensor swiglu_meta(const at::Tensor& gate, const at::Tensor& /*up*/) {
  return empty_as(gate);
}

TwoTensors swiglu_backward_meta(const at::Tensor& /*grad*/, const at::Tensor& gate, const at::Tensor& /*up*/) {
  return {empty_as(gate), empty_as(gate)};
}

at::Tensor call_swiglu(const at::Tensor& gate, const at::Tensor& up) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("tessera::swiglu", "").typed<decltype(swiglu_cpu)>();
  return op.call(gate, up);
}

TwoTensors call_swiglu_backward(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tessera::swiglu_backward", "")
                             .typed<decltype(swiglu_backward_cpu)>();
  return op.call(grad, gate, up);
}

class Swiglu : public torch::autograd::Function<Swiglu> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    const at::AutoDispatchBelowAutograd below;
    context->save_for_backward({gate, up});
    return call_swiglu(gate, up);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    if (at::GradMode::is_enabled()) {
      return fused::gradients_of_ops(
          saved, grads, [](const variable_list& x) -> variable_list { return {swiglu_of_ops(x[0], x[1])}; });
    }
    const auto [grad_gate, grad_up] = call_swiglu_backward(grads[0], saved[0], saved[1]);
    return {grad_gate, grad_up};
  }
};

at::Tensor swiglu_autograd(const at::Tensor& gate, const at::Tensor& up) {
  return Swiglu::apply(gate, up);
}

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  const bool is_taken =
      fused::takes_kernels(gate) && gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type();
  return is_taken ? call_swiglu(gate, up) : swiglu_of_ops(gate, up);
}

}  // namespace tessera

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  library.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  library.def("swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(tessera, CPU, library) {
  library.impl("swiglu", &tessera::swiglu_cpu);
  library.impl("swiglu_backward", &tessera::swiglu_backward_cpu);
}

TORCH_LIBRARY_IMPL(tessera, Meta, library) {
  library.impl("swiglu", &tessera::swiglu_meta);
  library.impl("swiglu_backward", &tessera::swiglu_backward_meta);
}

TORCH_LIBRARY_IMPL(tessera, Autograd, library) {
  library.impl("swiglu", &tessera::swiglu_autograd);
}
