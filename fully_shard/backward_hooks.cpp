#include "fully_shard/backward_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <map>
#include <memory>
#include <type_traits>
#include <vector>

#include "base/error.h"

namespace tessera {

namespace {

using torch::autograd::variable_list;

struct BackwardNode : torch::autograd::Node {
  explicit BackwardNode(torch::autograd::edge_list&& next) : Node(std::move(next)) {}

  variable_list apply(variable_list&& grads) override {
    TESSERA_CHECK(NotImplementedError, !at::GradMode::is_enabled(),
                  "fully_shard: a backward with create_graph through a unit. Its parameters are freed when the unit's "
                  "backward ends, so gradients of gradients would read freed memory; leave create_graph off");
    if (callback) {
      callback();
    }
    return std::move(grads);
  }
  void release_variables() override {}
  std::string name() const override { return "TesseraUnitBoundary"; }

  std::function<void()> callback;
};

// Nodes are owned by std::shared_ptr up to some libtorch before 2.15, by c10::intrusive_ptr since.
using NodePtr = decltype(torch::autograd::Edge::function);

template <class NodeType, class Ptr>
Ptr make_node(torch::autograd::edge_list&& edges, std::function<void()> callback) {
  if constexpr (std::is_same_v<Ptr, std::shared_ptr<torch::autograd::Node>>) {
    auto node = std::make_shared<NodeType>(std::move(edges));
    node->callback = std::move(callback);
    return node;
  } else {
    auto node = c10::make_intrusive<NodeType>(std::move(edges));
    node->callback = std::move(callback);
    return node;
  }
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
    : original_(std::move(original)), alias_(std::move(alias)), node_(node_of(alias_)) {}

bool AliasedTensor::was_changed() const {
  return node_of(alias_) != node_ && (original_.use_count() > 1 || original_.is_view());
}

bool AliasedTensor::can_share_history() const {
  return alias_.requires_grad() && !original_.is_leaf() && !original_.is_view() && !original_.retains_grad();
}

void AliasedTensor::share_history() const {
  torch::autograd::impl::set_gradient_edge(original_, torch::autograd::impl::gradient_edge(alias_));
}

const torch::autograd::Node* insert_backward_node(std::span<at::Tensor* const> tensors, std::function<void()> callback,
                                                  std::vector<AliasedTensor>* aliased) {
  if (!at::GradMode::is_enabled()) {
    return nullptr;
  }
  std::vector<at::Tensor*> differentiable;
  std::map<const at::TensorImpl*, at::Tensor> aliases;  // one of each, so that who changes it in place changes all
  torch::autograd::edge_list edges;
  std::vector<at::Tensor> originals;
  for (auto* tensor : tensors) {
    if (!tensor->requires_grad()) {
      continue;
    }
    differentiable.push_back(tensor);
    if (aliases.try_emplace(tensor->unsafeGetTensorImpl()).second) {
      edges.push_back(torch::autograd::impl::gradient_edge(*tensor));
      originals.push_back(*tensor);
    }
  }
  if (differentiable.empty()) {
    return nullptr;
  }
  const auto node = make_node<BackwardNode, NodePtr>(std::move(edges), std::move(callback));
  for (const auto& original : originals) {
    auto alias = original.detach();
    torch::autograd::impl::set_gradient_edge(alias, {node, node->add_input_metadata(alias)});
    if (aliased) {
      aliased->emplace_back(original, alias);
    }
    aliases[original.unsafeGetTensorImpl()] = std::move(alias);
  }
  for (auto* tensor : differentiable) {
    const auto alias = aliases.find(tensor->unsafeGetTensorImpl());
    if (alias != aliases.end()) {  // else one variable is there twice, and is the alias already
      *tensor = alias->second;
    }
  }
  return node.get();
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
