#pragma once
// Small feed-forward models with uneven sizes.
//
//   MLP stack: three MLPs with multipliers 3, 4 and 3, so that tensor parallelism over 2 shards 9 features unevenly
//   DoubleLinear: two results, or a second layer that is never used
//
// Source: torch/testing/_internal/common_fsdp.py.

#include <optional>
#include <utility>

#include "fully_shard/fully_shard.h"
#include "nn/hooks/hooked.h"
#include "nn/linear.h"
#include "nn/sequential.h"
#include "parallel/parallelize_module.h"
#include "testing/fsdp_models/test_model.h"

namespace tessera::testing {

struct MLPOptions {
  bool bias = true;
  bool with_buffer = false;
  int64_t dim_multiplier = 4;
};

/// Computes relu(out_proj(relu(in_proj(x)))), plus the buffer if there is one.
struct MLPImpl : torch::nn::Module {
  explicit MLPImpl(int64_t dim, MLPOptions options = {});
  at::Tensor forward(at::Tensor x);
  /// Draws the buffer anew; layers have their own reset_parameters.
  void reset_parameters();

  tessera::nn::Linear in_proj{nullptr}, out_proj{nullptr};
  at::Tensor buffer;
};
TESSERA_MODULE(MLP);

/// LayerNorm without bias.
struct ScaleNormImpl : torch::nn::Module {
  explicit ScaleNormImpl(int64_t dim);
  at::Tensor forward(at::Tensor x);

  at::Tensor weight;
};
TESSERA_MODULE(ScaleNorm);

/// Three MLPs, and a ScaleNorm if sequence-parallel.
tessera::nn::Sequential make_mlp_stack(int64_t dim, bool with_seq_parallel = false);

/// Column-wise, then row-wise, with DTensor activations, which may be uneven. The last output is plain and replicated,
/// or a DTensor sharded on dim 1 after the norm.
ParallelPlan mlp_stack_plan(bool with_seq_parallel = false);

struct ParallelizeMlpStackOptions {
  DeviceMesh tp_mesh;
  DeviceMesh dp_mesh;
  bool use_activation_checkpointing = false;
  FullyShardOptions fsdp_options = {};
  ShardFn shard = nullptr;  // fully_shard
};

/// Applies tensor parallelism to the whole stack, then makes each MLP and last the stack a unit. MLPs are checkpointed
/// if requested; the stack's unit has the norm. All ranks must call it.
void parallelize_mlp_stack(tessera::nn::Sequential& stack, const ParallelizeMlpStackOptions& options);

/// Computes (relu(lin1 x), relu(lin2 x)).
struct DoubleLinearImpl : torch::nn::Module {
  explicit DoubleLinearImpl(int64_t dim);
  std::pair<at::Tensor, at::Tensor> forward(at::Tensor x);

  tessera::nn::Linear lin1{nullptr}, lin2{nullptr};
};
TESSERA_MODULE(DoubleLinear);

/// Computes relu(lin1 x); lin2 is never used.
struct DoubleLinearUnusedImpl : torch::nn::Module {
  explicit DoubleLinearUnusedImpl(int64_t dim);
  at::Tensor forward(at::Tensor x);

  tessera::nn::Linear lin1{nullptr}, lin2{nullptr};
};
TESSERA_MODULE(DoubleLinearUnused);

}  // namespace tessera::testing
