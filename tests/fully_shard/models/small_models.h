#pragma once
// Models whose dims do not divide by 2, 3 or 4, and the one-process oracle that sharded training must equal.

#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

#include "fully_shard/fully_shard.h"
#include "nn/embedding.h"
#include "nn/hooks/hooked.h"
#include "nn/linear.h"
#include "nn/normalization.h"
#include "testing/fixtures.h"
#include "testing/parity.h"

namespace tessera::testing {

/// x + W2 tanh(W1 x), with hidden size `hidden`.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t dim, int64_t hidden);
  at::Tensor forward(at::Tensor x);

  tessera::nn::Linear up{nullptr}, down{nullptr};
};
TESSERA_MODULE(Block);

/// For policies that choose modules: whether `module` is a Block.
bool is_block(const std::string& name, torch::nn::Module& module);

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

/// With the same parameters for the same seed.
Tower filled_tower(uint64_t seed = 1);

/// filled_tower() under shard_tower.
Tower sharded_tower(const FullyShardOptions& options = {});

struct TowerPair {
  Tower reference, sharded;
};

/// Both with the parameters of filled_tower().
TowerPair make_tower_pair(const FullyShardOptions& options = {});

/// A different one for each rank and step.
at::Tensor rank_batch(int rank, int step = 0);

/// Of a batch that depends on its number only.
at::Tensor loss_of(Tower& tower, int64_t batch);

/// A different one for each rank and micro-batch.
at::Tensor micro_batch_loss(Tower& tower, int rank, int micro_batch = 0);

/// For check_sharded_parity, bit for bit but for the sign of zeros.
inline const ParityOptions kExact{.tolerance = {.rtol = 0, .atol = 0}};

/// Gradients of the average over ranks in `reference`, added up in the order of the collectives: over `shard_ranks`
/// neighbours first (none given: all ranks), then over the replicas. `run_rank(rank)` calls backward on that rank's
/// loss, once or several times.
void average_reference(torch::nn::Module& reference, int world_size, const std::function<void(int)>& run_rank,
                       int shard_ranks = 0);

}  // namespace tessera::testing
