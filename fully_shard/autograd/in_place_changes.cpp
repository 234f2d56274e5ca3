#include "fully_shard/autograd/in_place_changes.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "dtensor/local/tensor_memory.h"

namespace tessera {

namespace {

/// Returns the node, or null for a leaf.
const void* grad_node(const at::Tensor& tensor) {
  return tensor.grad_fn().get();
}

at::Tensor view_base(const at::Tensor& tensor) {
  return tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
}

/// Returns whether a change of one tensor changes the other. A DTensor's view may have separate memory, which is copied
/// back when the view changes.
bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  return (storage_id(a) && storage_id(a) == storage_id(b)) || view_base(a).is_same(view_base(b));
}

}  // namespace

AliasedTensor::AliasedTensor(at::Tensor original, at::Tensor alias)
    : original_(std::move(original)), alias_(std::move(alias)), node_(grad_node(alias_)) {}

bool AliasedTensor::has_caller() const {
  return alias_.is_same(original_) || original_.use_count() > 1 || original_.is_view();
}

bool AliasedTensor::has_own_history() const {
  return !alias_.is_same(original_) && grad_node(alias_) != node_;
}

std::string UnitTitle::to_string() const {
  return fmt::format("'{}' ({})", name, label);
}

void check_inputs_unchanged(const std::vector<AliasedTensor>& inputs, const UnitTitle& unit) {
  for (const auto& input : inputs) {
    TESSERA_CHECK(StateError, !input.has_own_history() || !input.has_caller(),
                  "{}: forward of the unit {} changed an input of sizes {} in place, which its caller still has: the "
                  "caller's tensor would have no part in the gradient of that change. Use the op out of place, or on a "
                  "clone() of the input",
                  unit.api, unit.to_string(), input.original().sizes());
  }
}

std::vector<at::Tensor*> find_shared_outputs(TensorRefs outputs, const std::vector<AliasedTensor>& inputs) {
  std::vector<at::Tensor*> shared;
  for (auto* output : outputs) {
    const auto is_other = [&](const at::Tensor* other) {
      return other->requires_grad() && !other->is_same(*output) && share_memory(*other, *output);
    };
    const auto is_input = [&](const AliasedTensor& input) {
      return input.original().requires_grad() && input.has_caller() &&
             (share_memory(input.original(), *output) || share_memory(input.alias(), *output));
    };
    if (output->requires_grad() && (std::ranges::any_of(outputs, is_other) || std::ranges::any_of(inputs, is_input))) {
      shared.push_back(output);
    }
  }
  return shared;
}

}  // namespace tessera
