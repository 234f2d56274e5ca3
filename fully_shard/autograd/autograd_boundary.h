#pragma once
// Where a unit begins and ends in autograd's graph.
//
// An identity node on each output of forward runs when the backward reaches the unit there, and one on each input when
// the backward leaves it there. Nodes rather than tensor hooks, because a hook is lost when its tensor is a view that
// is later changed in place (pytorch issue 181832). They are made of detached aliases, not views, so in-place ops on a
// unit's output keep working.
//
// libtorch takes thousands of instructions for a node. So where a call has one output, which is no view, a hook on the
// node of the op that made it does the same, and likewise where it has one input that nothing used before. A chain of
// units has no nodes but the model's own.
//
// One node a tensor, since libtorch runs all that a node has an edge to, also with an undefined gradient: functions of
// the program's own (torch::autograd::Function) make zeros of it, and tensor hooks do not expect it. So what is behind
// an output that the loss does not use does not run, as in one process, and its parameters have no gradient.
//
// A call's outputs, and its inputs, have a hub beside their nodes. Joins have edges to hubs alone, so no gradient and
// no op of the program is there:
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
// A hub costs as much as a node, so one tensor alone gets its hub only when a call with several looks for those behind
// it. Then there is no edge from the node to the hub. None is needed: backward runs the newest node that is ready, a
// node is newer than what it needs, and such a hub has its place in that order from the start.
//
// Source of the idea: RegisterPostBackwardFunction in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fully_shard/autograd/in_place_changes.h"
#include "fully_shard/autograd/join_search.h"

namespace tessera {

struct BoundarySide;

/// The inputs of a call, or its outputs, in the graph. On a GPU all nodes of one run in the thread of its backward,
/// also those of tensors on the CPU.
class AutogradBoundary {
 public:
  AutogradBoundary() = default;
  explicit AutogradBoundary(std::shared_ptr<BoundarySide> side) : side_(std::move(side)) {}

  /// Whether any of its tensors needs a gradient.
  bool exists() const { return side_ != nullptr; }
  /// Whether it is in the graph of the running backward. Of one where that graph begins, which is run first, this may
  /// not be said. All ranks have the same answer, whichever other graphs they keep.
  bool is_in_running_backward() const;
  const std::shared_ptr<BoundarySide>& side() const { return side_; }

 private:
  std::shared_ptr<BoundarySide> side_;
};

/// Replaces each input that needs a gradient by an alias behind a node of its own. A tensor that is there twice gets
/// one alias. The only one stays what it is if the node of the op that made it can be the border. `callback` runs in
/// backward when the gradients of all of them (that the backward computes) are there, and lives as long as the nodes.
/// Does nothing if grad mode is off. The inputs, each with what took its place, are added to `aliased`. `call`: the
/// number of the call, larger than those before.
AutogradBoundary insert_input_nodes(std::span<at::Tensor* const> inputs, int64_t call, std::function<void()> callback,
                                    JoinSearch& search, std::vector<AliasedTensor>& aliased);

/// A call whose outputs get their border.
struct BoundedCall {
  int64_t number;  // as for insert_input_nodes
  const AutogradBoundary& inputs;
  uint64_t first_node;  // of autograd, by its sequence number, that the call can have made
  bool has_calls;       // whether units were called between the inputs and the outputs
};

/// The same for outputs; `callback` runs when the first gradient of one is there, and again with others and at the hub,
/// where it is told that none is. `are_plain`: they share no memory with each other or with inputs. One alone of these
/// stays what it is if the node of the op that made it can be the border.
AutogradBoundary insert_output_nodes(std::span<at::Tensor* const> outputs, bool are_plain, const BoundedCall& call,
                                     std::function<void(bool has_gradient)> callback, JoinSearch& search);

/// From now on, a backward through the node of `output` throws StateError if the tensor's memory was changed in place.
/// `title`: what the message calls it.
void refuse_changes(const at::Tensor& output, const std::string& title);

}  // namespace tessera
