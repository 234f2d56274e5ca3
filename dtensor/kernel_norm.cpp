#include "dtensor/kernel_norm.h"

#include <cmath>
#include <optional>

#include "base/error.h"
#include "cuda/multi_norm.h"

namespace tessera {

namespace {

std::optional<cuda::NormKind> norm_kind(double p) {
  if (p == 1) {
    return cuda::NormKind::L1;
  }
  if (p == 2) {
    return cuda::NormKind::L2;
  }
  return p > 0 && std::isinf(p) ? std::optional(cuda::NormKind::Inf) : std::nullopt;
}

}  // namespace

bool has_norm_kernel(c10::DeviceType device, at::ScalarType dtype, double p) {
  return device == c10::DeviceType::CUDA && cuda::has_norm(dtype) && norm_kind(p);
}

at::Tensor norm_by_kernel(at::TensorList tensors, double p) {
  const auto kind = norm_kind(p);
  TESSERA_ASSERT(kind.has_value(), "no kernel for a {}-norm", p);
  const at::Tensor norm = cuda::multi_tensor_norm(tensors, *kind);
  return kind == cuda::NormKind::L2 ? norm.sqrt() : norm;
}

}  // namespace tessera
