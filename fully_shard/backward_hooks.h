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
// A backward passes all hubs that any output could have led it to. So ranks whose losses use different outputs enter
// and leave the same units in the same order. A backward to chosen tensors (torch::autograd::grad, `inputs` of
// backward) runs nodes alone: units are then ended with it. What a unit reads of another one past its inputs, as a
// member that holds a tensor, is not followed, unless it has units inside.
//
// A unit's input is a tensor of the caller's, and stays that one where forward changes it in place or returns it. The
// change shows in the caller's tensor, which shares its memory with the alias, but the history does not. So such an
// input is one more output of the unit, the caller's tensor gets the history of that, and is what the unit returns:
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

#include "fully_shard/hub_search.h"

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace tessera {

/// An input of a unit, and the alias that took its place: the input itself where it needed no gradient.
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
  bool is_original() const { return alias_.is_same(original_); }

  at::Tensor original_, alias_;
  const void* node_;  // the alias's, which that keeps alive while it is unchanged
  int64_t version_;
};

// Nodes are owned by std::shared_ptr up to some libtorch before 2.15, by c10::intrusive_ptr since.
using NodePtr = decltype(torch::autograd::Edge::function);

/// The nodes of a call's inputs, or of its outputs. On a GPU all run in the thread of its backward, also those of
/// tensors on the CPU.
struct UnitBorder {
  NodePtr hub = {};  // null where no tensor needs a gradient
  HubPlace place = {};
};

/// For the calls of one forward of a tree.
HubSearch make_hub_search();

/// Replaces each input that needs a gradient by an alias behind a node of its own. A tensor that is there twice gets
/// one alias. `callback` runs in backward when the gradients of all of them (that the backward computes) are there, and
/// lives as long as the nodes. Does nothing if grad mode is off. The inputs, each with what took its place, are added
/// to `aliased`.
UnitBorder insert_input_nodes(std::span<at::Tensor* const> inputs, int64_t call, std::function<void()> callback,
                              HubSearch& search, std::vector<AliasedTensor>& aliased);

/// The same for outputs; `callback` runs when the first gradient of one is there, and again with others and at the hub,
/// where it is told that none is. `search`: null if no unit was called between the inputs and these.
UnitBorder insert_output_nodes(std::span<at::Tensor* const> outputs, const UnitBorder& inputs, int64_t call,
                               std::function<void(bool has_gradient)> callback, HubSearch* search);

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
