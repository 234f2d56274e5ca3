#include "fused/glu.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>

#include "fused/cpu/gate_kernels.h"
#include "fused/fused_ops.h"
#include "fused/gradients_of_ops.h"

namespace tessera {

namespace {

using fused::Activated;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor glu_of_ops(Activated activation, const at::Tensor& gate, const at::Tensor& up) {
  return (activation == Activated::Silu ? at::silu(gate) : at::gelu(gate, "tanh")) * up;
}

at::Tensor empty_as(const at::Tensor& x) {
  return at::empty(x.sizes(), x.options());
}

const fused::GateKernels& gate_kernels_of_cpu() {
  return fused::for_this_cpu([](auto set) -> const fused::GateKernels& { return fused::gate_kernels(set); });
}

template <Activated kActivation>
at::Tensor glu_cpu(const at::Tensor& gate, const at::Tensor& up) {
  const auto gates = gate.contiguous(), ups = up.contiguous();
  auto out = empty_as(gates);
  const fused::GateOperands of{.dtype = gate.scalar_type(),
                               .activation = kActivation,
                               .grad = nullptr,
                               .gate = gates.const_data_ptr(),
                               .up = ups.const_data_ptr(),
                               .out = out.mutable_data_ptr(),
                               .grad_gate = nullptr,
                               .grad_up = nullptr};
  at::parallel_for(0, out.numel(), fused::kElementsOfThread,
                   [&](int64_t begin, int64_t end) { gate_kernels_of_cpu().forward(of, begin, end); });
  return out;
}

template <Activated kActivation>
TwoTensors glu_backward_cpu(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up) {
  const auto grads = grad.contiguous(), gates = gate.contiguous(), ups = up.contiguous();
  auto grad_gate = empty_as(gates), grad_up = empty_as(gates);
  const fused::GateOperands of{.dtype = gate.scalar_type(),
                               .activation = kActivation,
                               .grad = grads.const_data_ptr(),
                               .gate = gates.const_data_ptr(),
                               .up = ups.const_data_ptr(),
                               .out = nullptr,
                               .grad_gate = grad_gate.mutable_data_ptr(),
                               .grad_up = grad_up.mutable_data_ptr()};
  at::parallel_for(0, gate.numel(), fused::kElementsOfThread,
                   [&](int64_t begin, int64_t end) { gate_kernels_of_cpu().backward(of, begin, end); });
  return {grad_gate, grad_up};
}

at::Tensor glu_meta(const at::Tensor& gate, const at::Tensor& /*up*/) {
  return empty_as(gate);
}

TwoTensors glu_backward_meta(const at::Tensor& /*grad*/, const at::Tensor& gate, const at::Tensor& /*up*/) {
  return {empty_as(gate), empty_as(gate)};
}

template <Activated kActivation>
at::Tensor call_glu(const at::Tensor& gate, const at::Tensor& up) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow(kActivation == Activated::Silu ? "tessera::swiglu" : "tessera::tanh_geglu", "")
          .typed<decltype(glu_meta)>();
  return op.call(gate, up);
}

template <Activated kActivation>
TwoTensors call_glu_backward(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow(
              kActivation == Activated::Silu ? "tessera::swiglu_backward" : "tessera::tanh_geglu_backward", "")
          .typed<decltype(glu_backward_meta)>();
  return op.call(grad, gate, up);
}

template <Activated kActivation>
class GluFunction : public torch::autograd::Function<GluFunction<kActivation>> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    const at::AutoDispatchBelowAutograd below;
    context->save_for_backward({gate, up});
    return call_glu<kActivation>(gate, up);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    if (at::GradMode::is_enabled()) {
      return fused::gradients_of_ops(
          saved, grads, [](const variable_list& x) -> variable_list { return {glu_of_ops(kActivation, x[0], x[1])}; });
    }
    const auto [grad_gate, grad_up] = call_glu_backward<kActivation>(grads[0], saved[0], saved[1]);
    return {grad_gate, grad_up};
  }
};

template <Activated kActivation>
at::Tensor glu_autograd(const at::Tensor& gate, const at::Tensor& up) {
  return GluFunction<kActivation>::apply(gate, up);
}

template <Activated kActivation>
at::Tensor glu(const at::Tensor& gate, const at::Tensor& up) {
  const bool is_taken =
      fused::takes_kernels(gate) && gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type();
  return is_taken ? call_glu<kActivation>(gate, up) : glu_of_ops(kActivation, gate, up);
}

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return glu<Activated::Silu>(gate, up);
}

at::Tensor tanh_geglu(const at::Tensor& gate, const at::Tensor& up) {
  return glu<Activated::TanhGelu>(gate, up);
}

}  // namespace tessera

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  library.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  library.def("swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  library.def("tanh_geglu(Tensor gate, Tensor up) -> Tensor");
  library.def("tanh_geglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(tessera, CPU, library) {
  library.impl("swiglu", &tessera::glu_cpu<tessera::fused::Activated::Silu>);
  library.impl("swiglu_backward", &tessera::glu_backward_cpu<tessera::fused::Activated::Silu>);
  library.impl("tanh_geglu", &tessera::glu_cpu<tessera::fused::Activated::TanhGelu>);
  library.impl("tanh_geglu_backward", &tessera::glu_backward_cpu<tessera::fused::Activated::TanhGelu>);
}

TORCH_LIBRARY_IMPL(tessera, Meta, library) {
  library.impl("swiglu", &tessera::glu_meta);
  library.impl("swiglu_backward", &tessera::glu_backward_meta);
  library.impl("tanh_geglu", &tessera::glu_meta);
  library.impl("tanh_geglu_backward", &tessera::glu_backward_meta);
}

TORCH_LIBRARY_IMPL(tessera, Autograd, library) {
  library.impl("swiglu", &tessera::glu_autograd<tessera::fused::Activated::Silu>);
  library.impl("tanh_geglu", &tessera::glu_autograd<tessera::fused::Activated::TanhGelu>);
}
