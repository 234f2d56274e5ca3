#include "fully_shard/autograd/aliased_tensor.h"

#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

namespace tessera {

namespace {

/// Null for a leaf.
const void* node_of(const at::Tensor& tensor) {
  return tensor.grad_fn().get();
}

/// The list that a tensor's node calls.
std::shared_ptr<torch::autograd::hooks_list> hooks_of(const at::Tensor& tensor) {
  const auto& hooks = torch::autograd::impl::get_autograd_meta(tensor)->cpp_hooks_list_;
  if (!hooks) {
    torch::autograd::impl::create_cpp_hook(tensor);
  }
  return hooks;
}

}  // namespace

AliasedTensor::AliasedTensor(at::Tensor original, at::Tensor alias)
    : original_(std::move(original)),
      alias_(std::move(alias)),
      node_(node_of(alias_)),
      version_(alias_.is_inference() ? 0 : alias_._version()) {}

bool AliasedTensor::has_new_history() const {
  if (node_of(alias_) == node_) {
    return false;
  }
  const bool is_passed_on = alias_.requires_grad() && alias_._version() == version_;  // by another unit, as it is
  return is_original() || !is_passed_on;
}

bool AliasedTensor::was_changed() const {
  return has_new_history() &&
         (is_original() ? original_.use_count() > 2 : original_.use_count() > 1 || original_.is_view());
}

bool AliasedTensor::can_share_history() const {
  return alias_.requires_grad() &&
         (is_original() || (!original_.is_leaf() && !original_.is_view() && !original_.retains_grad()));
}

// As after an op in place, hooks that the original has stay with its old node. Those that it gets go to the node that
// has the whole gradient: that in front of the original has what comes from outside of the unit.
void AliasedTensor::share_history_behind(at::Tensor in_front) {
  const auto hooks = hooks_of(has_new_history() ? alias_ : original_);
  torch::autograd::impl::set_gradient_edge(original_, torch::autograd::impl::gradient_edge(in_front));
  torch::autograd::impl::get_autograd_meta(original_)->cpp_hooks_list_ = hooks;
  alias_ = std::move(in_front);
}

}  // namespace tessera
