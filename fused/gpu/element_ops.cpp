// Elementwise fused ops on CUDA tensors.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "fused/gpu/element_kernels.h"
#include "fused/gpu/launch.h"

namespace tessera::fused {

namespace {

template <class Forward>
at::Tensor glu_cuda(const at::Tensor& gate, const at::Tensor& up) {
  const auto gates = gate.contiguous(), ups = up.contiguous();
  auto out = at::empty(gate.sizes(), gate.options());
  launch_on(gate, "tessera::glu", [&](cudaStream_t stream) {
    return launch_elements<Forward>(
        {.in = {gates.const_data_ptr(), ups.const_data_ptr()}, .out = {out.mutable_data_ptr()}, .count = out.numel()},
        kernel_dtype(gate), stream);
  });
  return out;
}

template <class Backward>
std::tuple<at::Tensor, at::Tensor> glu_backward_cuda(const at::Tensor& grad, const at::Tensor& gate,
                                                     const at::Tensor& up) {
  const auto grads = grad.contiguous(), gates = gate.contiguous(), ups = up.contiguous();
  auto grad_gate = at::empty(gate.sizes(), gate.options()), grad_up = at::empty(gate.sizes(), gate.options());
  launch_on(gate, "tessera::glu_backward", [&](cudaStream_t stream) {
    return launch_elements<Backward>({.in = {grads.const_data_ptr(), gates.const_data_ptr(), ups.const_data_ptr()},
                                      .out = {grad_gate.mutable_data_ptr(), grad_up.mutable_data_ptr()},
                                      .count = gate.numel()},
                                     kernel_dtype(gate), stream);
  });
  return {grad_gate, grad_up};
}

}  // namespace

}  // namespace tessera::fused

TORCH_LIBRARY_IMPL(tessera, CUDA, library) {
  using namespace tessera::fused;
  library.impl("swiglu", &glu_cuda<SwigluForward>);
  library.impl("swiglu_backward", &glu_backward_cuda<SwigluBackward>);
  library.impl("tanh_geglu", &glu_cuda<TanhGegluForward>);
  library.impl("tanh_geglu_backward", &glu_backward_cuda<TanhGegluBackward>);
}
