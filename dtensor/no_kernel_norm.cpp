#include "base/error.h"
#include "dtensor/kernel_norm.h"

namespace tessera {

bool has_norm_kernel(c10::DeviceType /*device*/, at::ScalarType /*dtype*/, double /*p*/) {
  return false;
}

at::Tensor norm_by_kernel(at::TensorList /*tensors*/, double p) {
  TESSERA_ASSERT(false, "a {}-norm by a kernel in a build without kernels", p);
}

}  // namespace tessera
