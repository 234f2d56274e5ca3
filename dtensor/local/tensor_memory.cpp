#include "dtensor/local/tensor_memory.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>

#include "dtensor/local/dtensor_impl.h"

namespace tessera {

const void* storage_id(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  const auto& local = meta ? meta->local : tensor;
  return local.has_storage() ? local.storage().unsafeGetStorageImpl() : nullptr;
}

void replace_data(const at::Tensor& tensor, const at::Tensor& data) {
  if (auto* meta = torch::autograd::impl::get_autograd_meta(tensor)) {
    const std::lock_guard lock(meta->mutex_);
    meta->grad_accumulator_.reset();
  }
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

void forget_autocasts() {
  at::autocast::clear_cache();
}

}  // namespace tessera
