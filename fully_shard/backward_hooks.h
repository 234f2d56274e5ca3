#pragma once
// Where a unit hooks into autograd.
//
// An identity node on each output of forward runs when the backward reaches the unit there, and one on each input when
// the backward leaves it there. Nodes rather than tensor hooks, because a hook is lost when its tensor is a view that
// is later changed in place (pytorch issue 181832). They are made of detached aliases, not views, so in-place ops on a
// unit's output keep working.
//
// One node a tensor, since libtorch runs all that a node has an edge to, also with an undefined gradient: functions of
// the program's own (torch::autograd::Function) make zeros of it, and tensor hooks do not expect it. So what is behind
// an output that the loss does not use does not run, as in one process, and its parameters have no gradient.
//
// The nodes of all outputs have an edge to a hub too, which is the call's own, and so have those of all inputs. Hubs
// have edges to hubs alone, so no gradient and no op of the program is there:
//
//   a ◀─ input node ◀── ... ◀── output node ◀─ y           y, z = block(a, b); loss(y)
//           │                     │                         z and b are not in the graph of this backward
//   ... ◀─ hub of inputs ◀── hub of outputs
//
// A backward passes all hubs that any output could have led it to. So ranks whose losses use different outputs of a
// unit with parameters of its own enter and leave the same units in the same order. A backward to chosen tensors
// (torch::autograd::grad, `inputs` of backward) runs nodes alone: units whose inputs have a hub are then ended with it.
// From the second forward on there are no hubs in trees where each call has one input and one output that need a
// gradient: there the nodes do all that.
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
#include <torch/csrc/autograd/edge.h>

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

// Nodes are owned by std::shared_ptr up to some libtorch before 2.15, by c10::intrusive_ptr since.
using NodePtr = decltype(torch::autograd::Edge::function);

/// The nodes of a call's inputs, or of its outputs. On a GPU all run in the thread of its backward, also those of
/// tensors on the CPU.
struct UnitBorder {
  NodePtr hub = {};                             // null where there is none
  const torch::autograd::Node* last = nullptr;  // the hub, or the one node; null where no tensor needs a gradient
  bool is_branch = false;                       // several tensors need one
};

struct HubOptions {
  bool makes_hubs = false;  // a hub also for one tensor alone
  NodePtr inputs = {};      // the hub of the call's inputs, for its outputs
  bool searches = true;     // whether other units' hubs lie behind the tensors, before that of the inputs
};

/// Replaces each input that needs a gradient by an alias behind a node of its own. A tensor that is there twice gets
/// one alias. `callback` runs in backward when the gradients of all of them (that the backward computes) are there, and
/// lives as long as the nodes. Does nothing if no tensor needs a gradient or grad mode is off. What was replaced is
/// added to `aliased`.
UnitBorder insert_input_nodes(std::span<at::Tensor* const> inputs, std::function<void()> callback,
                              const HubOptions& options, std::vector<AliasedTensor>& aliased);

/// The same for outputs; `callback` runs when the first gradient of one is there, and again with others and at the hub.
UnitBorder insert_output_nodes(std::span<at::Tensor* const> outputs, std::function<void()> callback,
                               const HubOptions& options);

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
