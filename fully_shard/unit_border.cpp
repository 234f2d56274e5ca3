#include "fully_shard/unit_border.h"

#include <ATen/SequenceNumber.h>
#include <ATen/ops/empty.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "base/error.h"
#include "fully_shard/backward_hooks.h"

namespace tessera {

/// What the nodes and the hub of a side share.
struct BorderSide {
  HubPlace place;
  std::shared_ptr<BorderSide> inputs;  // of a side of outputs that the inputs lie behind
  bool is_searched = true;             // whether others' hubs lie behind it, before those of the inputs
  uint64_t hub_number = 0;             // of a hub that is made later
  at::Device device = at::kCPU;
  torch::autograd::Node* node = nullptr;  // the one border node of a side whose hub is made later, while it lives
  torch::autograd::Node* hub = nullptr;   // while it lives

  bool has_nodes() const { return node || hub; }
};

namespace {

// Nodes are owned by std::shared_ptr up to some libtorch before 2.15, by c10::intrusive_ptr since.
using NodePtr = decltype(torch::autograd::Edge::function);

using torch::autograd::edge_list;
using torch::autograd::variable_list;
using Callback = std::shared_ptr<const std::function<void(bool has_gradient)>>;

void check_no_graph_is_made() {
  TESSERA_CHECK(NotImplementedError, !at::GradMode::is_enabled(),
                "fully_shard: a backward with create_graph through a unit. Its parameters are freed when the unit's "
                "backward ends, so gradients of gradients would read freed memory; leave create_graph off");
}

/// Of a tensor that shares it with others, in ways that autograd's history does not show.
struct UnchangeableMemory {
  c10::VariableVersion counter;
  uint32_t version;
  std::vector<int64_t> sizes;
  std::string unit;

  void check() const {
    TESSERA_CHECK(
        StateError, counter.current_version() == version,
        "fully_shard: an output of the unit {}, of sizes {}, shares its memory with another output or an input "
        "of it, and one of them was changed in place between forward and backward. The gradient of the others "
        "would be that of old values. Change a clone() of the output, or use the op out of place",
        unit, sizes);
  }
};

/// Of one tensor. Its edges: where the tensor came from, and the hub of a side of several.
struct BorderNode : torch::autograd::Node {
  explicit BorderNode(edge_list&& next) : Node(std::move(next)) {}
  ~BorderNode() override {
    if (side && side->node == this) {
      side->node = nullptr;
    }
  }

  variable_list apply(variable_list&& grads) override {
    check_no_graph_is_made();
    if (unchangeable) {
      unchangeable->check();
    }
    if (runs_callback) {
      (*callback)(/*has_gradient=*/true);
    }
    grads.resize(num_outputs());
    return std::move(grads);
  }
  void release_variables() override {}
  std::string name() const override { return "TesseraUnitBoundary"; }

  std::shared_ptr<BorderSide> side;
  Callback callback;
  bool runs_callback = true;  // not where the hub waits for the nodes
  std::unique_ptr<const UnchangeableMemory> unchangeable;
};

/// Gets no gradients.
struct HubNode : torch::autograd::Node {
  HubNode(uint64_t number, edge_list&& next, std::shared_ptr<BorderSide> of, Callback callback)
      : Node(number, std::move(next)), side(std::move(of)), callback(std::move(callback)) {
    side->hub = this;
  }
  ~HubNode() override { side->hub = nullptr; }

  variable_list apply(variable_list&& /*grads*/) override {
    check_no_graph_is_made();
    if (!side->node || !is_in_running_backward(side->node)) {  // which does it
      (*callback)(/*has_gradient=*/false);
    }
    return variable_list(num_outputs());
  }
  void release_variables() override {}
  std::string name() const override { return "TesseraUnit"; }

  const std::shared_ptr<BorderSide> side;
  const Callback callback;
};

template <class NodeType, class... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<NodeType>(std::forward<Args>(args)...);
  } else {
    return c10::make_intrusive<NodeType>(std::forward<Args>(args)...);
  }
}

BorderSide* side_of(const torch::autograd::Node& node) {
  return typeid(node) == typeid(BorderNode) ? static_cast<const BorderNode&>(node).side.get() : nullptr;
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
  std::vector<at::Tensor> originals;  // of border.tensors: one alias of each, so that who changes one changes all
  for (auto* tensor : tensors) {
    if (!tensor->requires_grad()) {
      if (aliased) {
        aliased->emplace_back(*tensor, *tensor);
      }
      continue;
    }
    const auto is_tensor = [&](const at::Tensor& other) { return other.is_same(*tensor); };
    if (std::ranges::any_of(border.tensors, is_tensor)) {
      continue;  // one variable may be there twice, and is the alias already
    }
    if (const auto known = std::ranges::find_if(originals, is_tensor); known != originals.end()) {
      *tensor = border.tensors[static_cast<size_t>(known - originals.begin())];
      continue;
    }
    auto alias = tensor->detach();
    const auto& node =
        border.nodes.emplace_back(make_node<BorderNode>(edge_list{torch::autograd::impl::gradient_edge(*tensor)}));
    torch::autograd::impl::set_gradient_edge(alias, {node, node->add_input_metadata(alias)});
    if (aliased) {
      aliased->emplace_back(*tensor, alias);
    }
    border.tensors.push_back(alias);
    originals.push_back(std::exchange(*tensor, std::move(alias)));
  }
  run_in_one_thread(border);
  return border;
}

/// Gives hubs to sides that have none yet.
class HubMaker {
 public:
  explicit HubMaker(HubSearch& search) : search_(search) {}

  /// To the hubs behind a side, whose tensors come `from` there.
  edge_list edges_behind(const BorderSide& side, const edge_list& from) {
    const auto sides = sides_behind(side, from);
    std::vector<Made> made;
    make_all(sides, made);
    return edges_to(sides);
  }

 private:
  struct Made {
    decltype(make_node<HubNode>(0, edge_list(), nullptr, nullptr)) hub;
    std::vector<BorderSide*> behind;
  };

  std::vector<BorderSide*> sides_behind(const BorderSide& side, const edge_list& from) {
    std::vector<BorderSide*> sides;
    HubPlace known;
    if (side.inputs && side.inputs->has_nodes()) {
      sides.push_back(side.inputs.get());
      known = side.inputs->place;
    }
    if (side.is_searched) {
      for (const auto* node : search_.find(from, side.place, known)) {
        sides.push_back(side_of(*node));
      }
    }
    return sides;
  }

  /// And those behind them. A hub gets its edges before one that has an edge to it, as autograd asks.
  void make_all(std::vector<BorderSide*> sides, std::vector<Made>& made) {
    while (!sides.empty()) {
      auto* side = sides.back();
      sides.pop_back();
      if (side->hub) {
        continue;
      }
      const auto& node = static_cast<const BorderNode&>(*side->node);
      auto hub = make_node<HubNode>(side->hub_number, edge_list(), node.side, node.callback);
      hub->add_input_metadata(at::empty({0}, side->device));
      made.push_back({std::move(hub), sides_behind(*side, {node.next_edge(0)})});
      sides.insert(sides.end(), made.back().behind.begin(), made.back().behind.end());
    }
    std::ranges::sort(made, {}, [](const Made& one) { return one.hub->sequence_nr(); });
    for (const auto& [hub, behind] : made) {
      for (auto& edge : edges_to(behind)) {
        hub->add_next_edge(std::move(edge));
      }
    }
  }

  static edge_list edges_to(const std::vector<BorderSide*>& sides) {
    edge_list edges;
    for (auto* side : sides) {
      edges.emplace_back(side->hub->getptr(), 0);
    }
    return edges;
  }

  HubSearch& search_;
};

/// Puts the nodes onto the side. Several have their hub at once, and it waits for them.
UnitBorder connect(const BorderNodes& border, BorderSide side_to_be, HubSearch& search, const Callback& callback) {
  const auto side = std::make_shared<BorderSide>(std::move(side_to_be));
  side->device = on_device(border).device();
  edge_list from;
  for (const auto& node : border.nodes) {
    node->side = side;
    node->callback = callback;
    from.push_back(node->next_edge(0));
  }
  if (border.nodes.size() == 1) {
    side->node = border.nodes[0].get();
    return UnitBorder(side);
  }
  const auto hub = make_node<HubNode>(at::sequence_number::get_and_increment(),
                                      HubMaker(search).edges_behind(*side, from), side, callback);
  hub->add_input_metadata(on_device(border));
  for (const auto& node : border.nodes) {
    node->runs_callback = side->place.is_of_outputs;
    node->add_next_edge({hub, 0});
  }
  return UnitBorder(side);
}

}  // namespace

bool UnitBorder::is_in_running_backward() const {
  return side_ && ((side_->node && tessera::is_in_running_backward(side_->node)) ||
                   (side_->hub && tessera::is_in_running_backward(side_->hub)));
}

HubSearch make_hub_search() {
  return HubSearch([](const torch::autograd::Node& node) {
    const auto* side = side_of(node);
    return side ? &side->place : nullptr;
  });
}

UnitBorder insert_input_nodes(std::span<at::Tensor* const> inputs, int64_t call, std::function<void()> callback,
                              HubSearch& search, std::vector<AliasedTensor>& aliased) {
  const auto hub_number = at::sequence_number::get_and_increment();  // before the nodes: it runs after them
  const auto border = insert_border_nodes(inputs, &aliased);
  if (border.nodes.empty()) {
    return {};
  }
  return connect(
      border, {.place = {.call = call}, .inputs = nullptr, .hub_number = hub_number}, search,
      std::make_shared<const std::function<void(bool)>>([callback = std::move(callback)](bool) { callback(); }));
}

UnitBorder insert_output_nodes(std::span<at::Tensor* const> outputs, const UnitBorder& inputs, int64_t call,
                               std::function<void(bool has_gradient)> callback, HubSearch& search, bool has_calls) {
  const auto border = insert_border_nodes(outputs, nullptr);
  if (border.nodes.empty()) {
    return {};
  }
  return connect(border,
                 {.place = {.call = call, .is_of_outputs = true},
                  .inputs = inputs.side(),
                  .is_searched = has_calls,
                  .hub_number = at::sequence_number::get_and_increment()},
                 search, std::make_shared<const std::function<void(bool)>>(std::move(callback)));
}

void refuse_changes(const at::Tensor& output, const std::string& unit) {
  auto& node = static_cast<BorderNode&>(*output.grad_fn());
  const auto& counter = output.unsafeGetTensorImpl()->version_counter();
  node.unchangeable =
      std::make_unique<const UnchangeableMemory>(counter, counter.current_version(), output.sizes().vec(), unit);
}

}  // namespace tessera
