#pragma once
// Models to cut by tensor parallelism, and the oracle: training equals that of the plain model on one process.

#include <torch/nn/module.h>

#include <functional>
#include <string>

#include "nn/hooked.h"
#include "nn/linear.h"
#include "nn/sequential.h"
#include "parallel/parallel_style.h"

namespace tessera::testing {

/// relu(out_proj(relu(in_proj(x)))), with multiplier * dim hidden features.
struct MlpImpl : torch::nn::Module {
  MlpImpl(int64_t dim, int64_t multiplier);
  at::Tensor forward(at::Tensor x);

  tessera::nn::Linear in_proj{nullptr}, out_proj{nullptr};
};
TESSERA_MODULE(Mlp);

/// LayerNorm without bias.
struct ScaleNormImpl : torch::nn::Module {
  explicit ScaleNormImpl(int64_t dim);
  at::Tensor forward(at::Tensor x);

  at::Tensor weight;
};
TESSERA_MODULE(ScaleNorm);

/// Three Mlps with multipliers 3, 4 and 3 and, if sequence-parallel, a ScaleNorm.
tessera::nn::Sequential make_mlp_stack(int64_t dim, bool sequence_parallel = false);

/// Column-wise, then row-wise, activations as DTensors; the last output is plain and whole, or a DTensor cut along dim
/// 1 behind the norm.
ParallelPlan mlp_stack_plan(bool sequence_parallel = false);

/// float64, so that sums in another order do not matter; values depend on `seed` and sizes only.
void fill_parameters(torch::nn::Module& module, uint64_t seed);
at::Tensor make_input(uint64_t seed, at::IntArrayRef sizes);

/// Mean of squares and of values, weighted element by element: its gradient is nowhere zero.
at::Tensor weighted_loss(const at::Tensor& out);

using Forward = std::function<at::Tensor(const at::Tensor&)>;

struct TrainingPair {
  torch::nn::Module& reference;
  torch::nn::Module& sharded;
  Forward run_reference;
  Forward run_sharded;
  /// The loss of either output.
  Forward loss = weighted_loss;
};

/// Four steps of Adam with both modules on `input`: outputs, gradients of the input and of all parameters, their
/// placements, and all parameters are compared at each step. Collective; throws ExpectationError.
void train_and_compare(const TrainingPair& pair, const at::Tensor& input);

/// A plain tensor of a DTensor, or the tensor itself.
at::Tensor whole(const at::Tensor& tensor);

/// The text of the exception that `action` throws; "" if none.
std::string error_text(const std::function<void()>& action);

}  // namespace tessera::testing
