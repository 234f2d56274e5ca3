#include "fused/fused_ops.h"

#include <atomic>

namespace tessera {

namespace {

std::atomic<bool> is_enabled = true;

}  // namespace

void set_fused_ops(bool enabled) {
  is_enabled = enabled;
}

bool fused_ops_enabled() {
  return is_enabled;
}

namespace fused {

bool takes_kernels(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return fused_ops_enabled() &&
         (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf);
}

}  // namespace fused

}  // namespace tessera
