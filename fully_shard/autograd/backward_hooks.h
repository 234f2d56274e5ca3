#pragma once
// Queries and hooks of the running backward. See also autograd_boundary.h, which adds units to its graph.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace tessera {

class FSDPState;

/// Calls `callback` whenever the gradient of `param` is complete, while `owner` lives. Replaces an earlier hook.
void set_post_accumulate_grad_hook(const at::Tensor& param, std::weak_ptr<FSDPState> owner,
                                   std::function<void(FSDPState& owner)> callback);
/// Calls `callback` before a gradient is accumulated into `param`, even a frozen one, while `owner` lives.
void add_pre_accumulate_grad_hook(const at::Tensor& param, std::weak_ptr<FSDPState> owner,
                                  std::function<void(FSDPState& owner, const at::TensorBase& grad)> callback);
/// Returns the unit of `param`, or null.
std::shared_ptr<FSDPState> find_owner(const at::Tensor& param);

/// Calls `callback` at the end of the running backward. Call it only inside a backward.
void at_end_of_backward(std::function<void()> callback);

/// Returns the id of the running backward, or -1 outside one.
int64_t current_backward();

/// Returns whether the running backward returns the gradient of `leaf`, like torch::autograd::grad.
bool is_captured(const at::Tensor& leaf);

/// Returns whether a node belongs to the running graph. Unspecified for its root.
bool is_in_running_backward(const torch::autograd::Node* node);

}  // namespace tessera
