#pragma once
// What the engine asks of the backward that runs, and has it call. How units get into its graph is in
// autograd_boundary.h.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace tessera {

class FSDPState;

/// Calls `callback` in backward each time the gradient of `param`, of the unit `owner`, is complete; not when the unit
/// is gone. Replaces an earlier one.
void set_post_accumulate_grad_hook(const at::Tensor& param, std::weak_ptr<FSDPState> owner,
                                   std::function<void(FSDPState& owner)> callback);
/// Calls `callback` in backward each time before a gradient is accumulated into `param`, of the unit `owner`; not when
/// the unit is gone. As Tensor::register_hook, but also while the parameter is frozen.
void add_pre_accumulate_grad_hook(const at::Tensor& param, std::weak_ptr<FSDPState> owner,
                                  std::function<void(FSDPState& owner, const at::TensorBase& grad)> callback);
/// The unit that `param` is of, as long as it lives; null if it is of none.
std::shared_ptr<FSDPState> owner_of(const at::Tensor& param);

/// Calls `callback` at the end of the running backward. Only inside a backward.
void at_end_of_backward(std::function<void()> callback);

/// An id of the running backward; -1 outside of one.
int64_t current_backward();

/// Whether the running backward hands the gradient of `leaf` to its caller, as that of torch::autograd::grad does, in
/// place of accumulating it.
bool is_captured(const at::Tensor& leaf);

/// Whether a node is in the graph of the running backward. Of the node where that graph begins, which runs first, this
/// may not be said.
bool is_in_running_backward(const torch::autograd::Node* node);

}  // namespace tessera
