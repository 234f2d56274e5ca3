#include "fully_shard/autograd/boundary_nodes.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>
#include <span>
#include <typeinfo>
#include <unordered_set>

#include "base/error.h"
#include "fully_shard/autograd/backward_hooks.h"

namespace tessera {

namespace {

using torch::autograd::edge_list;
using torch::autograd::variable_list;

using Hooks = std::span<const std::unique_ptr<torch::autograd::FunctionPreHook>>;

/// Returns null for other hooks.
const BoundaryHook* as_boundary(const torch::autograd::FunctionPreHook& hook) {
  return typeid(hook) == typeid(BoundaryHook) ? static_cast<const BoundaryHook*>(&hook) : nullptr;
}

const BoundaryMark* first_mark_among(Hooks hooks) {
  for (const auto& hook : hooks) {
    if (const auto* boundary = as_boundary(*hook)) {
      return &boundary->mark;
    }
  }
  return nullptr;
}

void check_no_graph_is_made() {
  TESSERA_CHECK(NotImplementedError, !at::GradMode::is_enabled(),
                "a backward with create_graph through a unit of fully_shard or replicate. Its parameters are freed "
                "when the unit's backward ends, so gradients of gradients would read freed memory. Compute them within "
                "the forward of one unit, and return what the loss needs of them; or leave create_graph off");
}

/// Returns whether the graph leads from `from` to the target of `to`. No node is newer than those that lead to it.
bool leads_to(const torch::autograd::Node& from, const torch::autograd::Edge& to) {
  const bool is_leaf = to.function->sequence_nr() == std::numeric_limits<uint64_t>::max();
  std::vector<const torch::autograd::Node*> to_look_at{&from};
  std::unordered_set<const torch::autograd::Node*> seen;
  while (!to_look_at.empty()) {
    const auto* node = to_look_at.back();
    to_look_at.pop_back();
    for (const auto& edge : node->next_edges()) {
      if (edge == to) {
        return true;
      }
      if (edge.is_valid() && (is_leaf || edge.function->sequence_nr() >= to.function->sequence_nr()) &&
          seen.insert(edge.function.get()).second) {
        to_look_at.push_back(edge.function.get());
      }
    }
  }
  return false;
}

/// Checks that tensor hooks of outputs see the complete gradient. They do not if another output was computed from the
/// hooked one, because its gradient takes another path.
void check_hooks(const BoundarySide& side) {
  for (auto* output : side.outputs) {
    const auto brings_more = [&](const BoundaryNode* other) {
      return other != output && is_in_running_backward(other) && leads_to(*other, output->next_edge(0));
    };
    TESSERA_CHECK(StateError, !output->has_tensor_hooks() || std::ranges::none_of(side.outputs, brings_more),
                  "an output of a unit of fully_shard or replicate has a tensor hook, or retains its gradient, but the "
                  "unit's forward computes another output from it, and of that gradient nothing is seen there. Call "
                  "register_hook() or retain_grad() within forward, on the tensor that it returns later");
  }
}

}  // namespace

BoundaryMark::~BoundaryMark() {
  if (side && side->mark == this) {
    side->mark = nullptr;
  }
}

BoundaryNode::~BoundaryNode() {
  if (mark.side) {
    std::erase(mark.side->outputs, this);
  }
}

variable_list BoundaryNode::apply(variable_list&& grads) {
  check_no_graph_is_made();
  if (check_unchanged) {
    check_unchanged();
  }
  if (runs_callback) {
    (*mark.callback)(/*has_gradient=*/true);
  }
  grads.resize(num_outputs());
  return std::move(grads);
}

variable_list BoundaryHook::operator()(const variable_list& grads) {
  check_no_graph_is_made();
  (*mark.callback)(/*has_gradient=*/true);
  return grads;
}

JoinNode::JoinNode(uint64_t number, edge_list&& next, std::shared_ptr<BoundarySide> of, BoundaryCallback callback)
    : Node(number, std::move(next)), side(std::move(of)), callback(std::move(callback)) {
  side->join = this;
}

variable_list JoinNode::apply(variable_list&& /*grads*/) {
  check_no_graph_is_made();
  check_hooks(*side);
  if (!side->mark || !is_in_running_backward(&side->mark->node)) {  // which does it
    (*callback)(/*has_gradient=*/false);
  }
  return variable_list(num_outputs());
}

const BoundaryMark* first_mark(const torch::autograd::Node& node) {
  if (typeid(node) == typeid(BoundaryNode)) {
    return &static_cast<const BoundaryNode&>(node).mark;
  }
  return first_mark_among(node.pre_hooks());
}

const BoundaryMark* next_mark(const BoundaryMark& mark) {
  const std::span hooks(mark.node.pre_hooks());
  const auto is_own = [&](const auto& hook) {
    const auto* own = as_boundary(*hook);
    return own && &own->mark == &mark;
  };
  const auto found = std::ranges::find_if(hooks, is_own);
  return found == hooks.end() ? nullptr
                              : first_mark_among(hooks.subspan(static_cast<size_t>(found - hooks.begin()) + 1));
}

edge_list edges_of_boundary(const torch::autograd::Node& boundary) {
  return typeid(boundary) == typeid(BoundaryNode) ? edge_list{boundary.next_edge(0)} : boundary.next_edges();
}

}  // namespace tessera
