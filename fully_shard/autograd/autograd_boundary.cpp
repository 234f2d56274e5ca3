#include "fully_shard/autograd/autograd_boundary.h"

#include <ATen/SequenceNumber.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <typeinfo>
#include <utility>
#include <vector>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "fully_shard/autograd/backward_hooks.h"
#include "fully_shard/autograd/boundary_nodes.h"

namespace tessera {

namespace {

using torch::autograd::edge_list;

struct BoundaryNodes {
  std::vector<decltype(make_node<BoundaryNode>(edge_list()))> nodes;
  std::vector<at::Tensor> tensors;  // the nodes' inputs
};

const at::Tensor& first_on_device(const BoundaryNodes& boundary) {
  const auto found = std::ranges::find_if(boundary.tensors, [](const at::Tensor& tensor) { return !tensor.is_cpu(); });
  return found == boundary.tensors.end() ? boundary.tensors.at(0) : *found;
}

/// Autograd has one thread per device, and runs a node in the thread of its first input that is not on the CPU.
void run_in_one_thread(const BoundaryNodes& boundary) {
  for (size_t i = 0; i < boundary.nodes.size(); ++i) {
    if (boundary.tensors[i].is_cpu() && !first_on_device(boundary).is_cpu()) {
      boundary.nodes[i]->add_input_metadata(first_on_device(boundary));
    }
  }
}

/// Like detach(), but skips the dispatcher if no key needs it.
at::Tensor make_alias(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  if (is_dtensor(tensor) || tensor.is_inference() || tensor.layout() != at::kStrided) {
    return tensor.detach();
  }
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

/// Puts each tensor that needs a gradient behind a separate node.
BoundaryNodes insert_boundary_nodes(std::span<at::Tensor* const> tensors, std::vector<AliasedTensor>* aliased) {
  BoundaryNodes boundary;
  if (!at::GradMode::is_enabled()) {
    return boundary;
  }
  std::vector<at::Tensor> originals;  // of boundary.tensors: one alias for each, so that changes of one affect all uses
  for (auto* tensor : tensors) {
    if (!tensor->requires_grad()) {
      if (aliased) {
        aliased->emplace_back(*tensor, *tensor);
      }
      continue;
    }
    const auto is_tensor = [&](const at::Tensor& other) { return other.is_same(*tensor); };
    if (std::ranges::any_of(boundary.tensors, is_tensor)) {
      continue;  // the same variable occurred before, and is already the alias
    }
    if (const auto known = std::ranges::find_if(originals, is_tensor); known != originals.end()) {
      *tensor = boundary.tensors[static_cast<size_t>(known - originals.begin())];
      continue;
    }
    auto alias = make_alias(*tensor);
    const auto& node =
        boundary.nodes.emplace_back(make_node<BoundaryNode>(edge_list{torch::autograd::impl::gradient_edge(*tensor)}));
    torch::autograd::impl::set_gradient_edge(alias, {node, node->add_input_metadata(alias)});
    if (aliased) {
      aliased->emplace_back(*tensor, alias);
    }
    boundary.tensors.push_back(alias);
    originals.push_back(std::exchange(*tensor, std::move(alias)));
  }
  run_in_one_thread(boundary);
  return boundary;
}

/// Returns the node of the op that made `tensor`, or null if it cannot be a boundary. Excludes views, which an in-place
/// op may remove from the history; nodes with tensor hooks; and nodes of another thread, which others may use. Sequence
/// numbers are per thread, too.
torch::autograd::Node* find_op(const at::Tensor& tensor) {
  if (!at::GradMode::is_enabled() || !tensor.requires_grad() || tensor.is_view()) {
    return nullptr;
  }
  auto* node = tensor.grad_fn().get();
  const bool is_free = node && node->num_outputs() > 0 && typeid(*node) != typeid(BoundaryNode) &&
                       node->thread_id() == at::RecordFunction::currentThreadId() && node->tensor_pre_hooks().empty() &&
                       node->retains_grad_hooks().empty();
  return is_free ? node : nullptr;
}

/// Returns the only tensor that needs a gradient; null if there are none or several.
at::Tensor* only_one(std::span<at::Tensor* const> tensors) {
  const auto needs_gradient = [](const at::Tensor* tensor) { return tensor->requires_grad(); };
  const auto found = std::ranges::find_if(tensors, needs_gradient);
  return std::ranges::count_if(tensors, needs_gradient) == 1 ? *found : nullptr;
}

/// Returns the node of an output if this call made it, outside any inner unit.
torch::autograd::Node* find_output_op(const at::Tensor& output, uint64_t first_node) {
  auto* node = find_op(output);
  return node && node->sequence_nr() >= first_node && node->pre_hooks().empty() ? node : nullptr;
}

/// Returns the node of an input if nothing else can have used the input before: such a use would come between the unit
/// and the node in backward, and the unit would keep its memory that long. No node is newer, except one of a unit that
/// ends there.
torch::autograd::Node* find_input_op(const at::Tensor& input) {
  auto* node = find_op(input);
  if (!node) {
    return nullptr;
  }
  auto newest = node->sequence_nr();
  if (!node->pre_hooks().empty()) {
    const auto* mark = node->pre_hooks().size() == 1 ? first_mark(*node) : nullptr;
    if (!mark || !mark->side->place.is_of_outputs) {
      return nullptr;
    }
    newest = mark->side->join_number;
  }
  return newest <= node->sequence_nr() + 1 && at::sequence_number::peek() == newest + 1 ? node : nullptr;
}

edge_list edges_to(const std::vector<BoundarySide*>& sides) {
  edge_list edges;
  for (auto* side : sides) {
    edges.emplace_back(side->join->getptr(), 0);
  }
  return edges;
}

/// Returns the sides whose joins are behind `side`, whose tensors come `from` these edges.
std::vector<BoundarySide*> sides_behind(const BoundarySide& side, const edge_list& from, JoinSearch& search) {
  std::vector<BoundarySide*> sides;
  JoinPlace known;
  if (side.inputs && side.inputs->has_nodes()) {
    sides.push_back(side.inputs.get());
    known = side.inputs->place;
  }
  if (side.is_searched) {
    for (const auto* node : search.find(from, side.place, known)) {
      sides.push_back(first_mark(*node)->side.get());
    }
  }
  return sides;
}

/// Returns edges to the joins of sides, creating joins that are missing there and behind them. A join gets its edges
/// before another join has an edge to it, as autograd requires.
edge_list edges_to_joins(const std::vector<BoundarySide*>& sides, JoinSearch& search) {
  struct Made {
    decltype(make_node<JoinNode>(0, edge_list(), nullptr, nullptr)) join;
    std::vector<BoundarySide*> behind;
  };
  std::vector<Made> made;
  auto left = sides;
  while (!left.empty()) {
    auto* side = left.back();
    left.pop_back();
    if (side->join) {
      continue;
    }
    const auto& mark = *side->mark;
    auto join = make_node<JoinNode>(side->join_number, edge_list(), mark.side, mark.callback);
    join->add_input_metadata(at::empty({0}, side->device));
    const auto* next = next_mark(mark);
    made.push_back({std::move(join),
                    next ? std::vector{next->side.get()} : sides_behind(*side, edges_of_boundary(mark.node), search)});
    left.insert(left.end(), made.back().behind.begin(), made.back().behind.end());
  }
  std::ranges::sort(made, {}, [](const Made& one) { return one.join->sequence_nr(); });
  for (const auto& [join, behind] : made) {
    for (auto& edge : edges_to(behind)) {
      join->add_next_edge(std::move(edge));
    }
  }
  return edges_to(sides);  // while `made` keeps the joins
}

/// Connects the nodes to the side. Several nodes get their join immediately, and it waits for them.
void connect(const BoundaryNodes& boundary, const std::shared_ptr<BoundarySide>& side, JoinSearch& search,
             const BoundaryCallback& callback) {
  side->device = first_on_device(boundary).device();
  edge_list from;
  for (const auto& node : boundary.nodes) {
    node->mark.side = side;
    node->mark.callback = callback;
    from.push_back(node->next_edge(0));
  }
  if (boundary.nodes.size() == 1) {
    side->mark = &boundary.nodes[0]->mark;
    return;
  }
  auto edges = edges_to_joins(sides_behind(*side, from, search), search);
  const auto join = make_node<JoinNode>(at::sequence_number::get_and_increment(), std::move(edges), side, callback);
  join->add_input_metadata(first_on_device(boundary));
  for (const auto& node : boundary.nodes) {
    node->runs_callback = side->place.is_of_outputs;
    node->add_next_edge({join, 0});
    if (side->place.is_of_outputs) {
      side->outputs.push_back(node.get());
    }
  }
}

/// Makes `op`, the node of the op that made the only tensor, the boundary. If it is null, inserts nodes.
AutogradBoundary insert_nodes(std::span<at::Tensor* const> tensors, torch::autograd::Node* op, BoundarySide side_to_be,
                              std::function<void(bool)> callback, JoinSearch& search,
                              std::vector<AliasedTensor>* aliased) {
  const auto boundary = op ? BoundaryNodes() : insert_boundary_nodes(tensors, aliased);
  if (!op && boundary.nodes.empty()) {
    return {};
  }
  auto side = std::make_shared<BoundarySide>(std::move(side_to_be));
  const auto shared_callback = std::make_shared<const std::function<void(bool)>>(std::move(callback));
  if (side->place.is_of_outputs) {
    side->join_number = at::sequence_number::get_and_increment();
  }
  if (!op) {
    connect(boundary, side, search, shared_callback);
    return side;
  }
  for (const auto* tensor : tensors) {
    if (aliased) {
      aliased->emplace_back(*tensor, *tensor);
    }
  }
  auto hook = std::make_unique<BoundaryHook>(*op);
  hook->mark.side = side;
  hook->mark.callback = shared_callback;
  side->mark = &hook->mark;
  op->pre_hooks().insert(op->pre_hooks().begin(), std::move(hook));
  return side;
}

}  // namespace

bool is_in_running_backward(const AutogradBoundary& boundary) {
  return boundary && ((boundary->mark && is_in_running_backward(&boundary->mark->node)) ||
                      (boundary->join && is_in_running_backward(boundary->join)));
}

AutogradBoundary insert_input_nodes(std::span<at::Tensor* const> inputs, int64_t call,
                                    std::function<void(bool)> callback, JoinSearch& search,
                                    std::vector<AliasedTensor>& aliased) {
  const auto* only = only_one(inputs);
  auto* op = only ? find_input_op(*only) : nullptr;
  BoundarySide side{.place = {.call = call},
                    .inputs = nullptr,
                    .join_number = at::sequence_number::get_and_increment(),  // before the nodes: it runs after them
                    .device = op ? only->device() : at::kCPU};
  return insert_nodes(inputs, op, std::move(side), std::move(callback), search, &aliased);
}

AutogradBoundary insert_output_nodes(std::span<at::Tensor* const> outputs, bool are_plain, const BoundedCall& call,
                                     std::function<void(bool)> callback, JoinSearch& search) {
  const auto* only = are_plain ? only_one(outputs) : nullptr;
  auto* op = only ? find_output_op(*only, call.first_node) : nullptr;
  BoundarySide side{.place = {.call = call.number, .is_of_outputs = true},
                    .inputs = call.inputs,
                    .is_searched = call.has_calls,
                    .device = op ? only->device() : at::kCPU};
  return insert_nodes(outputs, op, std::move(side), std::move(callback), search, nullptr);
}

void refuse_changes(const at::Tensor& output, const std::string& title) {
  const auto counter = output.unsafeGetTensorImpl()->version_counter();
  static_cast<BoundaryNode&>(*output.grad_fn()).check_unchanged = [counter, version = counter.current_version(),
                                                                   sizes = output.sizes().vec(), title] {
    TESSERA_CHECK(StateError, counter.current_version() == version,
                  "{}, of sizes {}, shares its memory with another output or an input of it, and one of them was "
                  "changed in place between forward and backward. The gradient of the others would be that of old "
                  "values. Change a clone() of the output, or use the op out of place",
                  title, sizes);
  };
}

}  // namespace tessera
