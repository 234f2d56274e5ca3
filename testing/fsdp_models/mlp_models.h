#pragma once
// Small feed-forward models whose sizes do not divide evenly.
//
//   MLP stack: three MLPs with multipliers 3, 4 and 3, so that tensor parallelism over 2 cuts 3 x 3 = 9 features
//   unevenly DoubleLinear: two results, or a second layer that is never used
//
// After torch/testing/_internal/common_fsdp.py.

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

/// relu(out_proj(relu(in_proj(x)))), plus the buffer if there is one.
struct MLPImpl : torch::nn::Module {
  explicit MLPImpl(int64_t dim, MLPOptions options = {});
  at::Tensor forward(at::Tensor x);
  /// Draws the buffer anew; the layers have a reset_parameters of their own.
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

/// Column-wise, then row-wise, activations as DTensors, so that they may be cut unevenly; the last output is plain and
/// whole, or a DTensor cut along dim 1 behind the norm.
ParallelPlan mlp_stack_plan(bool with_seq_parallel = false);

struct ParallelizeMlpStackOptions {
  DeviceMesh tp_mesh;
  DeviceMesh dp_mesh;
  bool use_activation_checkpointing = false;
  FullyShardOptions fsdp_options = {};
  ShardFn shard = nullptr;  // fully_shard
};

/// Tensor parallelism over the whole stack; then each MLP, checkpointed if asked, a unit; last the stack, whose unit
/// has the norm. Collective.
void parallelize_mlp_stack(tessera::nn::Sequential& stack, const ParallelizeMlpStackOptions& options);

/// (relu(lin1 x), relu(lin2 x)).
struct DoubleLinearImpl : torch::nn::Module {
  explicit DoubleLinearImpl(int64_t dim);
  std::pair<at::Tensor, at::Tensor> forward(at::Tensor x);

  tessera::nn::Linear lin1{nullptr}, lin2{nullptr};
};
TESSERA_MODULE(DoubleLinear);

/// relu(lin1 x); lin2 is never used.
struct DoubleLinearUnusedImpl : torch::nn::Module {
  explicit DoubleLinearUnusedImpl(int64_t dim);
  at::Tensor forward(at::Tensor x);

  tessera::nn::Linear lin1{nullptr}, lin2{nullptr};
};
TESSERA_MODULE(DoubleLinearUnused);

}  // namespace tessera::testing
