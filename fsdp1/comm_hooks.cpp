#include "fsdp1/comm_hooks.h"

#include <ATen/ops/empty.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cmath>
#include <utility>

#include "comm/collectives.h"

namespace tessera {

namespace {

void reduce(const DefaultState& state, const at::Tensor& grad, const at::Tensor& output) {
  if (output.defined()) {
    reduce_scatter_hook(state, grad, output);
  } else {
    allreduce_hook(state, grad);
  }
}

CommHook compress_hook(DefaultState state, at::ScalarType dtype) {
  const auto run = [state = std::move(state), dtype](const at::Tensor& grad, const at::Tensor& output) {
    const auto& result = output.defined() ? output : grad;
    const auto low = grad.to(dtype);
    const auto low_output = output.defined() ? at::empty(output.sizes(), low.options()) : at::Tensor();
    reduce(state, low, low_output);
    result.copy_(low_output.defined() ? low_output : low);
  };
  return {.run = run, .is_low_precision = true};
}

}  // namespace

DefaultState::DefaultState(const ProcessGroupPtr& group) : group_(std::make_shared<ProcessGroupPtr>(group)) {
  const auto ranks = static_cast<double>(get_world_size(group));
  while (std::fmod(ranks, predivide_factor_) == 0 && ranks / predivide_factor_ > predivide_factor_) {
    predivide_factor_ *= 2;
  }
  postdivide_factor_ = ranks / predivide_factor_;
}

void allreduce_hook(const DefaultState& state, const at::Tensor& grad) {
  grad.div_(state.gradient_predivide_factor());
  all_reduce(grad, ReduceOp::Sum, state.process_group());
  grad.div_(state.gradient_postdivide_factor());
}

void reduce_scatter_hook(const DefaultState& state, const at::Tensor& grad, const at::Tensor& output) {
  grad.div_(state.gradient_predivide_factor());
  reduce_scatter(output, grad, ReduceOp::Sum, state.process_group());
  output.div_(state.gradient_postdivide_factor());
}

CommHook default_hook(DefaultState state) {
  return {.run = std::bind_front(reduce, std::move(state))};
}

CommHook fp16_compress_hook(DefaultState state) {
  return compress_hook(std::move(state), at::kHalf);
}

CommHook bf16_compress_hook(DefaultState state) {
  return compress_hook(std::move(state), at::kBFloat16);
}

}  // namespace tessera
