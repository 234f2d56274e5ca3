#include "fully_shard/aliased_tensor.h"

#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace tessera {

namespace {

/// Null for a leaf.
const void* node_of(const at::Tensor& tensor) {
  return tensor.grad_fn().get();
}

}  // namespace

AliasedTensor::AliasedTensor(at::Tensor original, at::Tensor alias)
    : original_(std::move(original)),
      alias_(std::move(alias)),
      node_(node_of(alias_)),
      version_(alias_.is_inference() ? 0 : alias_._version()) {}

bool AliasedTensor::was_changed() const {
  if (node_of(alias_) == node_) {
    return false;
  }
  if (is_original()) {
    return original_.use_count() > 2;
  }
  const bool is_passed_on = alias_.requires_grad() && alias_._version() == version_;  // by another unit, as it is
  return !is_passed_on && (original_.use_count() > 1 || original_.is_view());
}

bool AliasedTensor::can_share_history() const {
  return alias_.requires_grad() &&
         (is_original() || (!original_.is_leaf() && !original_.is_view() && !original_.retains_grad()));
}

void AliasedTensor::share_history() const {
  torch::autograd::impl::set_gradient_edge(original_, torch::autograd::impl::gradient_edge(alias_));
}

}  // namespace tessera
