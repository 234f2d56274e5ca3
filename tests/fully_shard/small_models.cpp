#include "tests/fully_shard/small_models.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/randn.h>

#include "testing/run_ranks.h"

namespace tessera::testing {

BlockImpl::BlockImpl(int64_t dim, int64_t hidden) {
  up = register_module("up", tessera::nn::Linear(dim, hidden));
  down = register_module("down", tessera::nn::Linear(hidden, dim));
}

at::Tensor BlockImpl::forward(at::Tensor x) {
  return x + down(up(x).tanh());
}

TowerImpl::TowerImpl(int64_t dim, int64_t hidden, int64_t num_blocks) {
  in = register_module("in", tessera::nn::Linear(5, dim));
  for (int64_t i = 0; i < num_blocks; ++i) {
    blocks.push_back(register_module("block" + std::to_string(i), Block(dim, hidden)));
  }
  norm = register_module("norm", tessera::nn::LayerNorm(torch::nn::LayerNormOptions({dim})));
  out = register_module("out", tessera::nn::Linear(dim, 3));
}

at::Tensor TowerImpl::forward(at::Tensor x) {
  x = in(x);
  for (auto& block : blocks) {
    x = block(x);
  }
  return out(norm(x));
}

void fill_parameters(torch::nn::Module& module, uint64_t seed) {
  const at::NoGradGuard no_grad;
  auto generator = make_generator(seed);
  for (auto& param : module.parameters()) {
    param.copy_(at::randn(param.sizes(), generator) * 0.3);
  }
}

at::Tensor make_batch(uint64_t seed, int64_t rows, int64_t dim) {
  return at::randn({rows, dim}, make_generator(seed));
}

at::Tensor weighted_loss(const at::Tensor& out) {
  const auto weights = at::linspace(0.5, 1.5, out.numel()).view(out.sizes());
  return (out.square() * weights).mean() + (out * weights).mean();
}

void shard_tower(Tower& tower, const FullyShardOptions& options) {
  for (auto& block : tower->blocks) {
    fully_shard(block, options);
  }
  fully_shard(tower, options);
}

}  // namespace tessera::testing
