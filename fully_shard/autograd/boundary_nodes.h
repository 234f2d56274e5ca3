#pragma once
// The nodes of autograd that autograd_boundary.h puts into a graph.

#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fully_shard/autograd/join_search.h"

namespace tessera {

struct BoundaryMark;
struct BoundaryNode;

/// State that the nodes and the join of a side share.
struct BoundarySide {
  JoinPlace place;
  std::shared_ptr<BoundarySide> inputs;  // of a side of outputs that the inputs lie behind
  bool is_searched = true;               // whether others' joins lie behind it, before those of the inputs
  uint64_t join_number = 0;              // of a join that is made later
  at::Device device = at::kCPU;
  const BoundaryMark* mark = nullptr;       // of the one boundary of a side whose join is made later, while it lives
  torch::autograd::Node* join = nullptr;    // while it lives
  std::vector<BoundaryNode*> outputs = {};  // of a side of several outputs, while they live

  bool has_nodes() const { return mark || join; }
};

using BoundaryCallback = std::shared_ptr<const std::function<void(bool has_gradient)>>;

/// Mark of a node, which owns it, as a boundary.
struct BoundaryMark {
  explicit BoundaryMark(const torch::autograd::Node& of) : node(of) {}
  BoundaryMark(const BoundaryMark&) = delete;
  BoundaryMark& operator=(const BoundaryMark&) = delete;
  ~BoundaryMark();

  const torch::autograd::Node& node;
  std::shared_ptr<BoundarySide> side;
  BoundaryCallback callback;
};

/// A node of one tensor. Its edges: where the tensor came from, and the join of a side of several.
struct BoundaryNode : torch::autograd::Node {
  explicit BoundaryNode(torch::autograd::edge_list&& next) : Node(std::move(next)), mark(*this) {}
  ~BoundaryNode() override;

  bool has_tensor_hooks() { return !tensor_pre_hooks().empty() || !retains_grad_hooks().empty(); }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  void release_variables() override {}
  std::string name() const override { return "TesseraUnitBoundary"; }

  BoundaryMark mark;
  bool runs_callback = true;  // not where the join waits for the nodes
  std::function<void()>
      check_unchanged;  // throws if memory that others share was changed in place; empty: nothing to check
};

/// Makes the node of an op a boundary: that of the outputs of a call, and then that of the inputs of another, to which
/// its tensor goes on. The later one runs first.
struct BoundaryHook : torch::autograd::FunctionPreHook {
  explicit BoundaryHook(const torch::autograd::Node& node) : mark(node) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override;

  BoundaryMark mark;
};

/// Gets no gradients.
struct JoinNode : torch::autograd::Node {
  JoinNode(uint64_t number, torch::autograd::edge_list&& next, std::shared_ptr<BoundarySide> of,
           BoundaryCallback callback);
  ~JoinNode() override { side->join = nullptr; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  void release_variables() override {}
  std::string name() const override { return "TesseraUnit"; }

  const std::shared_ptr<BoundarySide> side;
  const BoundaryCallback callback;
};

/// Owned as libtorch owns nodes: by std::shared_ptr up to some version before 2.15, by c10::intrusive_ptr since.
template <class NodeType, class... Args>
auto make_node(Args&&... args) {
  using NodePtr = decltype(torch::autograd::Edge::function);
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<NodeType>(std::forward<Args>(args)...);
  } else {
    return c10::make_intrusive<NodeType>(std::forward<Args>(args)...);
  }
}

/// Returns the mark that backward meets first; null for a node that is no boundary.
const BoundaryMark* first_mark(const torch::autograd::Node& node);
/// Returns the mark that backward meets next at the same node; null behind the last.
const BoundaryMark* next_mark(const BoundaryMark& mark);

/// Returns the edges of a boundary to what its tensor came from.
torch::autograd::edge_list edges_of_boundary(const torch::autograd::Node& boundary);

}  // namespace tessera
