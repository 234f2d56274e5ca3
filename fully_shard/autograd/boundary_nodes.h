#pragma once
// Autograd nodes that autograd_boundary.h inserts into a graph.

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

/// State shared by the nodes and the join of one side of a call.
struct BoundarySide {
  JoinPlace place;
  std::shared_ptr<BoundarySide> inputs;  // for a side of outputs: the call's inputs, if they are behind it
  bool is_searched = true;               // whether to search for other joins behind it, before those of the inputs
  uint64_t join_number = 0;              // number of a join that is made later
  at::Device device = at::kCPU;
  const BoundaryMark* mark = nullptr;       // the only boundary of a side that gets its join later, while it lives
  torch::autograd::Node* join = nullptr;    // while it lives
  std::vector<BoundaryNode*> outputs = {};  // nodes of a side with several outputs, while they live

  bool has_nodes() const { return mark || join; }
};

using BoundaryCallback = std::shared_ptr<const std::function<void(bool has_gradient)>>;

/// Marks a node as a boundary. The node owns the mark.
struct BoundaryMark {
  explicit BoundaryMark(const torch::autograd::Node& of) : node(of) {}
  BoundaryMark(const BoundaryMark&) = delete;
  BoundaryMark& operator=(const BoundaryMark&) = delete;
  ~BoundaryMark();

  const torch::autograd::Node& node;
  std::shared_ptr<BoundarySide> side;
  BoundaryCallback callback;
};

/// Node of one tensor. It has edges to the tensor's previous node and to the join of a side with several tensors.
struct BoundaryNode : torch::autograd::Node {
  explicit BoundaryNode(torch::autograd::edge_list&& next) : Node(std::move(next)), mark(*this) {}
  ~BoundaryNode() override;

  bool has_tensor_hooks() { return !tensor_pre_hooks().empty() || !retains_grad_hooks().empty(); }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  void release_variables() override {}
  std::string name() const override { return "TesseraUnitBoundary"; }

  BoundaryMark mark;
  bool runs_callback = true;              // false if the join waits for the nodes
  std::function<void()> check_unchanged;  // throws if shared memory was changed in place; empty: nothing to check
};

/// Makes the node of an op a boundary. It can be the output of one call and then the input of another, in which case
/// the later boundary runs first.
struct BoundaryHook : torch::autograd::FunctionPreHook {
  explicit BoundaryHook(const torch::autograd::Node& node) : mark(node) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override;

  BoundaryMark mark;
};

/// Join, which receives no gradients.
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

/// Makes a node owned as libtorch requires: by std::shared_ptr before some version up to 2.15, then c10::intrusive_ptr.
template <class NodeType, class... Args>
auto make_node(Args&&... args) {
  using NodePtr = decltype(torch::autograd::Edge::function);
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<NodeType>(std::forward<Args>(args)...);
  } else {
    return c10::make_intrusive<NodeType>(std::forward<Args>(args)...);
  }
}

/// Returns the mark that backward reaches first, or null if the node is not a boundary.
const BoundaryMark* first_mark(const torch::autograd::Node& node);
/// Returns the next mark that backward reaches at the same node, or null after the last.
const BoundaryMark* next_mark(const BoundaryMark& mark);

/// Returns a boundary's edges to the previous node of its tensor.
torch::autograd::edge_list edges_of_boundary(const torch::autograd::Node& boundary);

}  // namespace tessera
