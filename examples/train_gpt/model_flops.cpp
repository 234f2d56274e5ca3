#include "examples/train_gpt/model_flops.h"

namespace tessera::examples {

// Computes in double, because the products of large models' sizes overflow integers.
double matrix_parameters(const GptConfig& model) {
  const auto dim = static_cast<double>(model.dim);
  constexpr double kQkv = 3, kAttentionOut = 1, kMlpIn = 4, kMlpOut = 4;  // dim x dim of each
  const double block = (kQkv + kAttentionOut + kMlpIn + kMlpOut) * dim * dim;
  return static_cast<double>(model.layers) * block + static_cast<double>(kByteValues) * dim;
}

double training_flops_per_token(const GptConfig& model) {
  const double attention =
      12.0 * static_cast<double>(model.layers) * static_cast<double>(model.dim) * static_cast<double>(model.context);
  return 6.0 * matrix_parameters(model) + attention;
}

}  // namespace tessera::examples
