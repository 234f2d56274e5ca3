#pragma once
// Where a unit hooks into autograd.
//
// An identity node on the outputs of forward runs when the backward reaches the unit; one on its inputs runs
// when the backward leaves it, after the gradients of everything in between. Nodes rather than tensor hooks,
// because a hook is lost when its tensor is a view that is later changed in place (pytorch issue 181832).
// They are made of detached aliases, not views, so in-place ops on a unit's output keep working.
//
// An in-place op on a unit's input changes the values of the caller's tensor too, which shares its memory with the
// alias, but not its history. So a changed input is one more output of the unit, and the caller's tensor gets its
// history:
//
//   y = block(h); loss(y + h)          block begins with h.relu_()
//   h's old history ◀─ input node ◀─ relu ◀─┬─ ... ◀─ output node ◀─ y
//                                           └─────── output node ◀─ h
//
// Source of the idea: RegisterPostBackwardFunction in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.

#include <ATen/core/Tensor.h>

#include <functional>
#include <span>
#include <vector>

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace tessera {

/// A tensor, and the alias that took its place.
class AliasedTensor {
 public:
  /// `alias` has its history already.
  AliasedTensor(at::Tensor original, at::Tensor alias);

  const at::Tensor& original() const { return original_; }
  at::Tensor& alias() { return alias_; }
  /// Whether an op changed the alias in place, and somebody may use the original, which has the old history. Not so for
  /// ops without grad mode, which change values alone in one process too.
  bool was_changed() const;
  /// Whether the alias's history can be the original's: not that of a leaf, a view (whose base changed too), or a
  /// tensor that retains its gradient.
  bool can_share_history() const;
  /// Makes it so.
  void share_history() const;

 private:
  at::Tensor original_, alias_;
  const void* node_;  // the alias's, which that keeps alive while it is unchanged
};

/// Replaces the tensors that need a gradient by aliases behind one identity node; `callback` runs in backward
/// when the gradients of all of them (that the backward computes) are there. A tensor that is there twice gets one
/// alias. Returns the node, which lives as long as the callback. Returns null, and does nothing, if no tensor needs a
/// gradient or grad mode is off. What it replaced is added to `aliased`, unless null.
const torch::autograd::Node* insert_backward_node(std::span<at::Tensor* const> tensors, std::function<void()> callback,
                                                  std::vector<AliasedTensor>* aliased = nullptr);

/// Calls `callback` in backward each time the gradient of `param` is complete. Replaces an earlier one.
void set_post_accumulate_grad_hook(const at::Tensor& param, std::function<void()> callback);

/// Calls `callback` at the end of the running backward. Only inside a backward.
void at_end_of_backward(std::function<void()> callback);

/// An id of the running backward; -1 outside of one.
int64_t current_backward();

/// Whether the running backward hands the gradient of `leaf` to its caller, as that of torch::autograd::grad does, in
/// place of accumulating it.
bool is_captured(const at::Tensor& leaf);

/// Whether a node is in the graph of the running backward. Of the node where that graph begins, which runs first, this
/// may not be said. All ranks have the same answer, whichever other graphs they keep.
bool is_in_running_backward(const torch::autograd::Node* node);

}  // namespace tessera
