#include "tests/fully_shard/models/small_models.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
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

bool is_block(const std::string& /*name*/, torch::nn::Module& module) {
  return dynamic_cast<BlockImpl*>(&module) != nullptr;
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

at::Tensor make_batch(uint64_t seed, int64_t rows, int64_t dim) {
  return at::randn({rows, dim}, make_generator(seed));
}

void shard_tower(Tower& tower, const FullyShardOptions& options) {
  for (auto& block : tower->blocks) {
    fully_shard(block, options);
  }
  fully_shard(tower, options);
}

Tower filled_tower(uint64_t seed) {
  Tower tower;
  fill_parameters(*tower, seed);
  return tower;
}

Tower sharded_tower(const FullyShardOptions& options) {
  auto tower = filled_tower();
  shard_tower(tower, options);
  return tower;
}

TowerPair make_tower_pair(const FullyShardOptions& options) {
  return {.reference = filled_tower(), .sharded = sharded_tower(options)};
}

at::Tensor rank_batch(int rank, int step) {
  return make_batch(static_cast<uint64_t>(rank + 10 * step), 3, 5);
}

at::Tensor loss_of(Tower& tower, int64_t batch) {
  return weighted_loss(tower(make_batch(static_cast<uint64_t>(batch), 3, 5)));
}

at::Tensor micro_batch_loss(Tower& tower, int rank, int micro_batch) {
  return weighted_loss(tower(rank_batch(rank, micro_batch)));
}

namespace {

/// By a tensor, as collectives divide: by a number a GPU multiplies with 1/n.
at::Tensor divided(const at::Tensor& sum, int by) {
  return sum.defined() ? sum / at::full({}, by, sum.options()) : sum;
}

}  // namespace

void average_reference(torch::nn::Module& reference, int world_size, const std::function<void(int)>& run_rank,
                       int shard_ranks) {
  const int ranks = shard_ranks == 0 ? world_size : shard_ranks;
  const int replicas = world_size / ranks;
  const auto params = reference.parameters();
  const auto add_to = [](at::Tensor& sum, const at::Tensor& grad) {
    sum = !sum.defined() ? grad : grad.defined() ? sum + grad : sum;
  };
  std::vector<at::Tensor> total(params.size());
  for (int replica = 0; replica < replicas; ++replica) {
    std::vector<at::Tensor> sum(params.size());
    for (int rank = replica * ranks; rank < (replica + 1) * ranks; ++rank) {
      reference.zero_grad();
      run_rank(rank);
      for (size_t i = 0; i < params.size(); ++i) {
        add_to(sum[i], params[i].grad());
      }
    }
    for (size_t i = 0; i < params.size(); ++i) {
      add_to(total[i], divided(sum[i], ranks));
    }
  }
  for (size_t i = 0; i < params.size(); ++i) {
    params[i].mutable_grad() = divided(total[i], replicas);
  }
}

}  // namespace tessera::testing
