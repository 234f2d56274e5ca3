#include "fully_shard/memory/replace_data.h"

#include <torch/csrc/autograd/variable.h>

#include <mutex>

namespace tessera {

void replace_data(const at::Tensor& tensor, const at::Tensor& data) {
  if (auto* meta = torch::autograd::impl::get_autograd_meta(tensor)) {
    const std::lock_guard lock(meta->mutex_);
    meta->grad_accumulator_.reset();
  }
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

}  // namespace tessera
