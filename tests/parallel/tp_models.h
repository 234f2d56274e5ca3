#pragma once
// The oracle of tensor parallelism: training equals that of the plain model on one process. The models are those of
// testing/fsdp_models/mlp_models.h.

#include <torch/nn/module.h>

#include <functional>
#include <string>

#include "testing/fixtures.h"
#include "testing/fsdp_models/mlp_models.h"
#include "testing/tensor_matchers.h"

namespace tessera::testing {

/// Of numbers in float64 that were added up in another order.
inline constexpr Tolerance kDoubleTolerance{.rtol = 1e-8, .atol = 1e-10};

/// fill_parameters in float64, so that sums in another order do not matter.
void fill_in_double(torch::nn::Module& module, uint64_t seed);
at::Tensor make_input(uint64_t seed, at::IntArrayRef sizes);

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
