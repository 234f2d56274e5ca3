#pragma once
// Models whose dims do not divide by 2, 3 or 4, and the one-process oracle that sharded training must equal.

#include <torch/nn/module.h>

#include <functional>
#include <vector>

#include "fully_shard/fully_shard.h"
#include "nn/embedding.h"
#include "nn/hooked.h"
#include "nn/linear.h"
#include "nn/normalization.h"
#include "testing/fixtures.h"

namespace tessera::testing {

/// x + W2 tanh(W1 x), with hidden size `hidden`.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t dim, int64_t hidden);
  at::Tensor forward(at::Tensor x);

  tessera::nn::Linear up{nullptr}, down{nullptr};
};
TESSERA_MODULE(Block);

/// Linear → blocks → LayerNorm → Linear. The outer layers belong to the root's unit.
struct TowerImpl : torch::nn::Module {
  explicit TowerImpl(int64_t dim = 17, int64_t hidden = 13, int64_t num_blocks = 3);
  at::Tensor forward(at::Tensor x);

  tessera::nn::Linear in{nullptr}, out{nullptr};
  std::vector<Block> blocks;
  tessera::nn::LayerNorm norm{nullptr};
};
TESSERA_MODULE(Tower);

/// A [rows, dim] input that depends only on its arguments.
at::Tensor make_batch(uint64_t seed, int64_t rows, int64_t dim);

/// Each block a unit, then the root.
void shard_tower(Tower& tower, const FullyShardOptions& options = {});

/// With the same parameters each time.
Tower filled_tower();

/// A different one for each rank and micro-batch.
at::Tensor micro_batch_loss(Tower& tower, int rank, int micro_batch = 0);

/// Gradients of the average over ranks in `reference`, added up in the order of the collectives: over `shard_ranks`
/// neighbours first (none given: all ranks), then over the replicas. `run_rank(rank)` calls backward on that rank's
/// loss, once or several times.
void average_reference(torch::nn::Module& reference, int world_size, const std::function<void(int)>& run_rank,
                       int shard_ranks = 0);

}  // namespace tessera::testing
