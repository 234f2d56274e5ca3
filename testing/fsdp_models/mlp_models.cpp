#include "testing/fsdp_models/mlp_models.h"

#include <ATen/ops/layer_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>

#include "activation_checkpoint/checkpoint.h"
#include "parallel/linear_styles.h"
#include "parallel/sequence_parallel.h"

namespace tessera::testing {

using tessera::nn::Linear;
using tessera::nn::LinearOptions;

MLPImpl::MLPImpl(int64_t dim, MLPOptions options) {
  const int64_t hidden = options.dim_multiplier * dim;
  in_proj = register_module("in_proj", Linear(LinearOptions(dim, hidden).bias(options.bias)));
  out_proj = register_module("out_proj", Linear(LinearOptions(hidden, dim).bias(options.bias)));
  if (options.with_buffer) {
    buffer = register_buffer("buffer", at::randn({dim}));
  }
}

at::Tensor MLPImpl::forward(at::Tensor x) {
  const auto y = out_proj(in_proj(x).relu()).relu();
  return buffer.defined() ? y + buffer : y;
}

void MLPImpl::reset_parameters() {
  if (buffer.defined()) {
    buffer.normal_();
  }
}

ScaleNormImpl::ScaleNormImpl(int64_t dim) {
  weight = register_parameter("weight", at::ones({dim}));
}

at::Tensor ScaleNormImpl::forward(at::Tensor x) {
  return at::layer_norm(x, weight.sizes(), weight);
}

tessera::nn::Sequential make_mlp_stack(int64_t dim, bool with_seq_parallel) {
  tessera::nn::Sequential stack;
  for (const int64_t multiplier : {3, 4, 3}) {
    stack->push_back(MLP(dim, MLPOptions{.dim_multiplier = multiplier}));
  }
  if (with_seq_parallel) {
    stack->push_back(ScaleNorm(dim));
  }
  return stack;
}

ParallelPlan mlp_stack_plan(bool with_seq_parallel) {
  ParallelPlan plan{{"[0-2].in_proj", ColwiseParallel()},
                    {"[01].out_proj", RowwiseParallel({.use_local_output = false})}};
  if (with_seq_parallel) {
    plan.add("2.out_proj", RowwiseParallel({.output_layouts = Shard(1)}));
    plan.add("3", SequenceParallel());
  } else {
    plan.add("2.out_proj", RowwiseParallel());
  }
  return plan;
}

void parallelize_mlp_stack(tessera::nn::Sequential& stack, const ParallelizeMlpStackOptions& options) {
  const bool with_seq_parallel = stack->size() == 4;
  parallelize_module(*stack, options.tp_mesh, mlp_stack_plan(with_seq_parallel));
  FullyShardOptions unit = options.fsdp_options;
  unit.mesh = options.dp_mesh;
  const auto shard = [&](torch::nn::Module& module) {
    options.shard ? options.shard(module, unit) : fully_shard(module, unit);
  };
  for (size_t i = 0; i < 3; ++i) {
    if (options.use_activation_checkpointing) {
      checkpoint_module(*stack->ptr(i));
    }
    shard(*stack->ptr(i));
  }
  shard(*stack);
}

DoubleLinearImpl::DoubleLinearImpl(int64_t dim) {
  lin1 = register_module("lin1", Linear(dim, dim));
  lin2 = register_module("lin2", Linear(dim, dim));
}

std::pair<at::Tensor, at::Tensor> DoubleLinearImpl::forward(at::Tensor x) {
  return {lin1(x).relu(), lin2(x).relu()};
}

DoubleLinearUnusedImpl::DoubleLinearUnusedImpl(int64_t dim) {
  lin1 = register_module("lin1", Linear(dim, dim));
  lin2 = register_module("lin2", Linear(dim, dim));
}

at::Tensor DoubleLinearUnusedImpl::forward(at::Tensor x) {
  return lin1(x).relu();
}

}  // namespace tessera::testing
