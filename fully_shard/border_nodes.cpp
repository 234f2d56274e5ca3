#include "fully_shard/border_nodes.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <typeinfo>

#include "base/error.h"
#include "fully_shard/backward_hooks.h"

namespace tessera {

namespace {

using torch::autograd::edge_list;
using torch::autograd::variable_list;

void check_no_graph_is_made() {
  TESSERA_CHECK(NotImplementedError, !at::GradMode::is_enabled(),
                "fully_shard: a backward with create_graph through a unit. Its parameters are freed when the unit's "
                "backward ends, so gradients of gradients would read freed memory; leave create_graph off");
}

}  // namespace

UnchangeableMemory::UnchangeableMemory(const at::Tensor& output, std::string unit)
    : counter_(output.unsafeGetTensorImpl()->version_counter()),
      version_(counter_.current_version()),
      sizes_(output.sizes().vec()),
      unit_(std::move(unit)) {}

void UnchangeableMemory::check() const {
  TESSERA_CHECK(StateError, counter_.current_version() == version_,
                "fully_shard: an output of the unit {}, of sizes {}, shares its memory with another output or an input "
                "of it, and one of them was changed in place between forward and backward. The gradient of the others "
                "would be that of old values. Change a clone() of the output, or use the op out of place",
                unit_, sizes_);
}

BorderNode::~BorderNode() {
  if (side && side->node == this) {
    side->node = nullptr;
  }
}

variable_list BorderNode::apply(variable_list&& grads) {
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

HubNode::HubNode(uint64_t number, edge_list&& next, std::shared_ptr<BorderSide> of, BorderCallback callback)
    : Node(number, std::move(next)), side(std::move(of)), callback(std::move(callback)) {
  side->hub = this;
}

variable_list HubNode::apply(variable_list&& /*grads*/) {
  check_no_graph_is_made();
  if (!side->node || !is_in_running_backward(side->node)) {  // which does it
    (*callback)(/*has_gradient=*/false);
  }
  return variable_list(num_outputs());
}

BorderSide* side_of(const torch::autograd::Node& node) {
  return typeid(node) == typeid(BorderNode) ? static_cast<const BorderNode&>(node).side.get() : nullptr;
}

}  // namespace tessera
