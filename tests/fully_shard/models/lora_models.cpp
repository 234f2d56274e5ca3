#include "tests/fully_shard/models/lora_models.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>

#include "dtensor/dtensor.h"
#include "parallel/distribute_module.h"
#include "testing/fixtures.h"

namespace tessera::testing {

LoraLinearImpl::LoraLinearImpl(int64_t in, int64_t out, int64_t adapter) {
  weight = register_parameter("weight", at::zeros({out, in}), /*requires_grad=*/false);
  lora_a = register_parameter("lora_a", at::zeros({adapter, in}));
  lora_b = register_parameter("lora_b", at::zeros({out, adapter}));
}

at::Tensor LoraLinearImpl::forward(at::Tensor x) {
  const auto base = at::linear(x.to(weight.scalar_type()), weight).to(x.scalar_type());
  const auto adapted = at::linear(at::linear(x.to(lora_a.scalar_type()), lora_a), lora_b);
  return base + adapted.to(x.scalar_type());
}

LoraBlockImpl::LoraBlockImpl(int64_t dim, int64_t hidden) {
  up = register_module("up", LoraLinear(dim, hidden, 3));
  down = register_module("down", LoraLinear(hidden, dim, 2));
  codes = register_parameter("codes", at::arange(10, 17, at::kByte), /*requires_grad=*/false);
}

at::Tensor LoraBlockImpl::forward(at::Tensor x) {
  return x + down(up(x).tanh()) * (codes.to(at::kFloat).mean() / 20).to(x.scalar_type());
}

LoraImpl::LoraImpl(int64_t dim, int64_t hidden) {
  in = register_module("in", tessera::nn::Linear(5, dim));
  for (int64_t i = 0; i < 2; ++i) {
    blocks.push_back(register_module("block" + std::to_string(i), LoraBlock(dim, hidden)));
  }
  out = register_module("out", LoraLinear(dim, 3, 2));
}

at::Tensor LoraImpl::forward(at::Tensor x) {
  x = in(x);
  for (auto& block : blocks) {
    x = block(x);
  }
  return out(x);
}

namespace {

void fill(LoraLinear& linear, uint64_t seed, at::ScalarType frozen) {
  fill_parameters(*linear, seed);
  linear->weight.set_data(linear->weight.to(frozen));
}

}  // namespace

Lora make_lora(int64_t dim, int64_t hidden, at::ScalarType frozen) {
  Lora lora(dim, hidden);
  fill_parameters(*lora->in, 1);
  fill(lora->out, 2, frozen);
  for (size_t i = 0; i < lora->blocks.size(); ++i) {
    fill(lora->blocks[i]->up, 3 + 2 * i, frozen);
    fill(lora->blocks[i]->down, 4 + 2 * i, frozen);
  }
  return lora;
}

namespace {

void cut_rows(LoraLinear& linear, const DeviceMesh& tp) {
  const auto partition = [](const std::string&, torch::nn::Module& module, const DeviceMesh& mesh) {
    distribute_parameter(module, "weight", mesh, {Shard(0)});
    distribute_parameter(module, "lora_a", mesh, {Replicate()});
    distribute_parameter(module, "lora_b", mesh, {Shard(0)});
  };
  const auto take_copy = [](torch::nn::Module&, TensorRefs inputs, const DeviceMesh& mesh) {
    *inputs[0] = from_local(*inputs[0], mesh, {Replicate()});
  };
  const auto give_whole = [](torch::nn::Module&, TensorRefs outputs, const DeviceMesh&) {
    *outputs[0] = full_tensor(*outputs[0]);
  };
  distribute_module(linear, tp, {.partition_fn = partition, .input_fn = take_copy, .output_fn = give_whole});
}

}  // namespace

void parallelize_lora(Lora& lora, const DeviceMesh& tp) {
  for (auto& block : lora->blocks) {
    cut_rows(block->up, tp);
    cut_rows(block->down, tp);
  }
}

}  // namespace tessera::testing
