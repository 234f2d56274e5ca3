#include "fully_shard/autograd/backward_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

#include "dtensor/local/parameter_origin.h"

namespace tessera {

namespace {

struct PostAccumulateGrad : UnitParameterHook {
  PostAccumulateGrad(std::weak_ptr<FSDPState> owner, std::function<void(FSDPState&)> callback)
      : owner(std::move(owner)), callback(std::move(callback)) {}
  void operator()(const torch::autograd::Variable& /*param*/) override {
    if (const auto live = owner.lock()) {
      callback(*live);
    }
  }
  bool has_live_unit() const override { return !owner.expired(); }

  std::weak_ptr<FSDPState> owner;
  std::function<void(FSDPState&)> callback;
};

}  // namespace

void set_post_accumulate_grad_hook(const at::Tensor& param, std::weak_ptr<FSDPState> owner,
                                   std::function<void(FSDPState& owner)> callback) {
  torch::autograd::impl::set_post_acc_grad_hooks(
      param, std::make_unique<PostAccumulateGrad>(std::move(owner), std::move(callback)));
}

void add_pre_accumulate_grad_hook(const at::Tensor& param, std::weak_ptr<FSDPState> owner,
                                  std::function<void(FSDPState& owner, const at::TensorBase& grad)> callback) {
  auto& hooks = torch::autograd::impl::materialize_autograd_meta(param)->cpp_hooks_list_;
  if (!hooks) {
    torch::autograd::impl::create_cpp_hook(param, /*is_retains_grad_hooks=*/false);
  }
  hooks->emplace_back([owner = std::move(owner), callback = std::move(callback)](const at::TensorBase& grad) {
    if (const auto live = owner.lock()) {
      callback(*live, grad);
    }
    return at::TensorBase();
  });
}

std::shared_ptr<FSDPState> find_owner(const at::Tensor& param) {
  const auto* hook = dynamic_cast<const PostAccumulateGrad*>(unit_parameter_hook(param));
  return hook ? hook->owner.lock() : nullptr;
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
