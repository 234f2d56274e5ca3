#pragma once
// AutogradBoundary: the nodes where a unit's call begins and ends in autograd's graph.
//
//   a ◀─ input node ◀── ... ◀── output node ◀─ y           y, z = block(a, b); loss(y)
//           │                     │                         z and b are not in the graph of this backward
//   ... ◀─ join of inputs ◀── join of outputs
//
// Each output gets an identity node, which runs when backward enters the unit; each input gets one, which runs when
// backward leaves it. Joins have edges only to joins, so ranks whose losses use different outputs enter and leave the
// same units in the same order. docs/semantics.md ("Units in autograd's graph") explains this, and lists the nodes that
// are omitted.

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

/// Boundary at the inputs or outputs of a call; null if none needs a gradient. On a GPU all nodes run in the backward
/// thread of the GPU, including those of CPU tensors.
using AutogradBoundary = std::shared_ptr<BoundarySide>;

/// Returns whether `boundary` belongs to the running backward, equally on all ranks. Unspecified for that graph's root.
bool is_in_running_backward(const AutogradBoundary& boundary);

/// Replaces each input that needs a gradient by an alias behind a node, and adds both to `aliased`. A single input
/// stays unchanged if the node of its op can be the boundary. `callback` runs in backward once the gradients of all
/// inputs are there. Does nothing if grad mode is off. `call` numbers must increase.
AutogradBoundary insert_input_nodes(std::span<at::Tensor* const> inputs, int64_t call,
                                    std::function<void(bool)> callback, JoinSearch& search,
                                    std::vector<AliasedTensor>& aliased);

/// Call whose outputs get a boundary.
struct BoundedCall {
  int64_t number;  // see insert_input_nodes
  const AutogradBoundary& inputs;
  uint64_t first_node;  // smallest sequence number of autograd nodes that the call may have made
  bool has_calls;       // whether other units were called between the inputs and the outputs
};

/// Does the same for outputs. `callback` runs with true for each gradient, and with false at a join without one.
/// `are_plain` means that the outputs share no memory with each other or with inputs.
AutogradBoundary insert_output_nodes(std::span<at::Tensor* const> outputs, bool are_plain, const BoundedCall& call,
                                     std::function<void(bool)> callback, JoinSearch& search);

/// Makes backward through `output` throw a StateError about `title` if its memory is changed in place.
void refuse_changes(const at::Tensor& output, const std::string& title);

}  // namespace tessera
