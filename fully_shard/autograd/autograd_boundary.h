#pragma once
// AutogradBoundary: where a call of a unit begins and ends in autograd's graph.
//
//   a ◀─ input node ◀── ... ◀── output node ◀─ y           y, z = block(a, b); loss(y)
//           │                     │                         z and b are not in the graph of this backward
//   ... ◀─ join of inputs ◀── join of outputs
//
// An identity node on each output runs when backward reaches the unit there, one on each input when it leaves the unit
// there. Joins have edges to joins alone, so ranks whose losses use different outputs enter and leave the same units in
// the same order. docs/semantics.md ("Units in autograd's graph") says why, and which nodes are spared.

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

/// The inputs of a call, or its outputs; null if none needs a gradient. On a GPU all nodes run in the thread of its
/// backward, also of tensors on the CPU.
using AutogradBoundary = std::shared_ptr<BoundarySide>;

/// Returns whether it belongs to the running backward, the same on all ranks. Unspecified for that graph's root.
bool is_in_running_backward(const AutogradBoundary& boundary);

/// Replaces each input that needs a gradient by an alias behind a node, and adds both to `aliased`. The only one stays
/// what it is if the node of its op can be the boundary. `callback` runs in backward when the gradients of all are
/// there. Does nothing if grad mode is off. `call` grows from call to call.
AutogradBoundary insert_input_nodes(std::span<at::Tensor* const> inputs, int64_t call,
                                    std::function<void(bool)> callback, JoinSearch& search,
                                    std::vector<AliasedTensor>& aliased);

/// A call whose outputs get their boundary.
struct BoundedCall {
  int64_t number;  // as for insert_input_nodes
  const AutogradBoundary& inputs;
  uint64_t first_node;  // of autograd, by its sequence number, that the call can have made
  bool has_calls;       // whether units were called between the inputs and the outputs
};

/// Does the same for outputs. `callback` runs with each gradient (true), and at the join without one (false).
/// `are_plain`: they share no memory with each other or with inputs.
AutogradBoundary insert_output_nodes(std::span<at::Tensor* const> outputs, bool are_plain, const BoundedCall& call,
                                     std::function<void(bool)> callback, JoinSearch& search);

/// Makes backward through `output` throw StateError, about `title`, if the tensor's memory changes in place.
void refuse_changes(const at::Tensor& output, const std::string& title);

}  // namespace tessera
