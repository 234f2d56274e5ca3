#include "fully_shard/layout/kernel_copies.h"

namespace tessera {

bool copy_by_kernels(std::span<const TensorCopy> /*copies*/) {
  return false;
}

}  // namespace tessera
