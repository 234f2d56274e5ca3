#include "fully_shard/backward_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <memory>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "base/error.h"

namespace tessera {

namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::variable_list;
using Callback = std::shared_ptr<const std::function<void(bool has_gradient)>>;

void check_no_graph_is_made() {
  TESSERA_CHECK(NotImplementedError, !at::GradMode::is_enabled(),
                "fully_shard: a backward with create_graph through a unit. Its parameters are freed when the unit's "
                "backward ends, so gradients of gradients would read freed memory; leave create_graph off");
}

/// Of one tensor. Its edges: where the tensor came from, and the hub if there is one.
struct BorderNode : torch::autograd::Node {
  explicit BorderNode(edge_list&& next) : Node(std::move(next)) {}

  variable_list apply(variable_list&& grads) override {
    check_no_graph_is_made();
    if (callback) {
      (*callback)(/*has_gradient=*/true);
    }
    grads.resize(num_outputs());
    return std::move(grads);
  }
  void release_variables() override {}
  std::string name() const override { return "TesseraUnitBoundary"; }

  Callback callback;
};

/// Gets no gradients, and runs behind the border nodes of its place.
struct HubNode : torch::autograd::Node {
  HubNode(HubPlace place, edge_list&& next) : Node(std::move(next)), place(place) {}

  variable_list apply(variable_list&& /*grads*/) override {
    check_no_graph_is_made();
    (*callback)(/*has_gradient=*/false);
    return variable_list(num_outputs());
  }
  void release_variables() override {}
  std::string name() const override { return "TesseraUnit"; }

  const HubPlace place;
  Callback callback;
};

template <class NodeType, class... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<NodeType>(std::forward<Args>(args)...);
  } else {
    return c10::make_intrusive<NodeType>(std::forward<Args>(args)...);
  }
}

/// Border nodes are the only ones with an edge to one.
FoundHub hub_of(const torch::autograd::Node& node) {
  if (typeid(node) != typeid(BorderNode)) {
    return {};
  }
  const auto& edge = node.next_edge(1);
  return {edge, static_cast<const HubNode&>(*edge.function).place};
}

struct BorderNodes {
  std::vector<decltype(make_node<BorderNode>(edge_list()))> nodes;
  std::vector<at::Tensor> tensors;  // in front of them
};

const at::Tensor& on_device(const BorderNodes& border) {
  const auto found = std::ranges::find_if(border.tensors, [](const at::Tensor& tensor) { return !tensor.is_cpu(); });
  return found == border.tensors.end() ? border.tensors.at(0) : *found;
}

/// Autograd has a thread a device, and runs a node in that of its first input which is not on the CPU.
void run_in_one_thread(const BorderNodes& border) {
  for (size_t i = 0; i < border.nodes.size(); ++i) {
    if (border.tensors[i].is_cpu() && !on_device(border).is_cpu()) {
      border.nodes[i]->add_input_metadata(on_device(border));
    }
  }
}

/// Puts each tensor that needs a gradient behind a node of its own.
BorderNodes insert_border_nodes(std::span<at::Tensor* const> tensors, std::vector<AliasedTensor>* aliased) {
  BorderNodes border;
  if (!at::GradMode::is_enabled()) {
    return border;
  }
  std::map<const at::TensorImpl*, at::Tensor> aliases;  // one of each, so that who changes it in place changes all
  std::vector<at::Tensor> originals;                    // whose addresses are theirs until all have been replaced
  for (auto* tensor : tensors) {
    if (!tensor->requires_grad()) {
      if (aliased) {
        aliased->emplace_back(*tensor, *tensor);
      }
      continue;
    }
    if (const auto known = aliases.find(tensor->unsafeGetTensorImpl()); known != aliases.end()) {
      *tensor = known->second;
      continue;
    }
    auto alias = tensor->detach();
    const auto& node =
        border.nodes.emplace_back(make_node<BorderNode>(edge_list{torch::autograd::impl::gradient_edge(*tensor)}));
    torch::autograd::impl::set_gradient_edge(alias, {node, node->add_input_metadata(alias)});
    if (aliased) {
      aliased->emplace_back(*tensor, alias);
    }
    aliases[tensor->unsafeGetTensorImpl()] = alias;
    aliases[alias.unsafeGetTensorImpl()] = alias;  // one variable may be there twice, and is the alias already
    border.tensors.push_back(alias);
    originals.push_back(std::exchange(*tensor, std::move(alias)));
  }
  run_in_one_thread(border);
  return border;
}

/// The nodes' hub, with edges to the hub `behind`, if there is one, and to those that `search` finds.
UnitBorder connect(const BorderNodes& border, HubPlace place, const UnitBorder& behind, HubSearch* search,
                   const Callback& callback) {
  edge_list edges;
  if (behind.hub) {
    edges.emplace_back(behind.hub, 0);
  }
  if (search) {
    edge_list from;
    for (const auto& node : border.nodes) {
      from.push_back(node->next_edge(0));
    }
    for (auto& found : search->find(from, place, {edges.empty() ? Edge() : edges[0], behind.place})) {
      edges.push_back(std::move(found.edge));
    }
  }
  const auto hub = make_node<HubNode>(place, std::move(edges));
  hub->add_input_metadata(on_device(border));
  hub->callback = callback;
  for (const auto& node : border.nodes) {
    node->add_next_edge({hub, 0});
  }
  return {.hub = hub, .place = place};
}

/// Null for a leaf.
const void* node_of(const at::Tensor& tensor) {
  return tensor.grad_fn().get();
}

struct PostAccumulateGrad : torch::autograd::PostAccumulateGradHook {
  explicit PostAccumulateGrad(std::function<void()> callback) : callback(std::move(callback)) {}
  void operator()(const torch::autograd::Variable& /*param*/) override { callback(); }

  std::function<void()> callback;
};

}  // namespace

AliasedTensor::AliasedTensor(at::Tensor original, at::Tensor alias)
    : original_(std::move(original)),
      alias_(std::move(alias)),
      node_(node_of(alias_)),
      version_(alias_.is_inference() ? 0 : alias_._version()) {}

bool AliasedTensor::was_changed() const {
  if (node_of(alias_) == node_) {
    return false;
  }
  if (is_original()) {
    return original_.use_count() > 2;
  }
  const bool is_passed_on = alias_.requires_grad() && alias_._version() == version_;  // by another unit, as it is
  return !is_passed_on && (original_.use_count() > 1 || original_.is_view());
}

bool AliasedTensor::can_share_history() const {
  return alias_.requires_grad() &&
         (is_original() || (!original_.is_leaf() && !original_.is_view() && !original_.retains_grad()));
}

void AliasedTensor::share_history() const {
  torch::autograd::impl::set_gradient_edge(original_, torch::autograd::impl::gradient_edge(alias_));
}

HubSearch make_hub_search() {
  return HubSearch(&hub_of);
}

UnitBorder insert_input_nodes(std::span<at::Tensor* const> inputs, int64_t call, std::function<void()> callback,
                              HubSearch& search, std::vector<AliasedTensor>& aliased) {
  const auto border = insert_border_nodes(inputs, &aliased);
  if (border.nodes.empty()) {
    return {};
  }
  return connect(
      border, {.call = call}, {}, &search,
      std::make_shared<const std::function<void(bool)>>([callback = std::move(callback)](bool) { callback(); }));
}

UnitBorder insert_output_nodes(std::span<at::Tensor* const> outputs, const UnitBorder& inputs, int64_t call,
                               std::function<void(bool has_gradient)> callback, HubSearch* search) {
  const auto border = insert_border_nodes(outputs, nullptr);
  if (border.nodes.empty()) {
    return {};
  }
  const auto shared = std::make_shared<const std::function<void(bool)>>(std::move(callback));
  for (const auto& node : border.nodes) {
    node->callback = shared;
  }
  return connect(border, {.call = call, .is_of_outputs = true}, inputs, search, shared);
}

void set_post_accumulate_grad_hook(const at::Tensor& param, std::function<void()> callback) {
  torch::autograd::impl::set_post_acc_grad_hooks(param, std::make_unique<PostAccumulateGrad>(std::move(callback)));
}

void at_end_of_backward(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

int64_t current_backward() {
  return torch::autograd::get_current_graph_task_id();
}

bool is_captured(const at::Tensor& leaf) {
  const auto* tasks = torch::autograd::get_current_graph_task_exec_info();
  if (!tasks || tasks->empty()) {
    return false;
  }
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf);
  const auto task = tasks->find(accumulator.get());
  return task != tasks->end() && task->second.captures_ && !task->second.captures_->empty();
}

bool is_in_running_backward(const torch::autograd::Node* node) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  return nodes && nodes->contains(const_cast<torch::autograd::Node*>(node));
}

}  // namespace tessera
