// Elementwise fused ops on CUDA tensors.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "fused/gpu/element_kernels.h"
#include "fused/gpu/launch.h"

namespace tessera::fused {

namespace {

at::Tensor swiglu_cuda(const at::Tensor& gate, const at::Tensor& up) {
  const auto gates = gate.contiguous(), ups = up.contiguous();
  auto out = at::empty(gate.sizes(), gate.options());
  launch_on(gate, "tessera::swiglu", [&](cudaStream_t stream) {
    return launch_elements<SwigluForward>(
        {.in = {gates.const_data_ptr(), ups.const_data_ptr()}, .out = {out.mutable_data_ptr()}, .count = out.numel()},
        kernel_dtype(gate), stream);
  });
  return out;
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward_cuda(const at::Tensor& grad, const at::Tensor& gate,
                                                        const at::Tensor& up) {
  const auto grads = grad.contiguous(), gates = gate.contiguous(), ups = up.contiguous();
  auto grad_gate = at::empty(gate.sizes(), gate.options()), grad_up = at::empty(gate.sizes(), gate.options());
  launch_on(gate, "tessera::swiglu_backward", [&](cudaStream_t stream) {
    return launch_elements<SwigluBackward>(
        {.in = {grads.const_data_ptr(), gates.const_data_ptr(), ups.const_data_ptr()},
         .out = {grad_gate.mutable_data_ptr(), grad_up.mutable_data_ptr()},
         .count = gate.numel()},
        kernel_dtype(gate), stream);
  });
  return {grad_gate, grad_up};
}

}  // namespace

}  // namespace tessera::fused

TORCH_LIBRARY_IMPL(tessera, CUDA, library) {
  library.impl("swiglu", &tessera::fused::swiglu_cuda);
  library.impl("swiglu_backward", &tessera::fused::swiglu_backward_cuda);
}
