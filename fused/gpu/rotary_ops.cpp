// Rotary positions of CUDA tensors.

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "fused/gpu/launch.h"
#include "fused/gpu/rotary_kernels.h"

namespace tessera::fused {

namespace {

at::Tensor rotate_cuda(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool back) {
  const auto rows = x.stride(3) == 1 ? x : x.contiguous();
  const auto cosines = cos.contiguous(), sines = sin.contiguous();
  auto out = at::empty_like(rows);
  launch_on(x, "tessera::rotate_positions", [&](cudaStream_t stream) {
    return launch_rotation(rotary_rows(rows, cosines, sines, out, back), kernel_dtype(x), stream);
  });
  return out;
}

}  // namespace

}  // namespace tessera::fused

TORCH_LIBRARY_IMPL(tessera, CUDA, library) {
  library.impl("rotate_positions", &tessera::fused::rotate_cuda);
}
