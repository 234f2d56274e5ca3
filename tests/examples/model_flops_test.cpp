// The count of a model's arithmetic, by hand, against the published count of GPT-3, and against the model's own layers.

#include "examples/train_gpt/model_flops.h"

#include "third_party/catch2/catch.h"

namespace tessera::examples {
namespace {

using Catch::Matchers::WithinRel;

TEST_CASE("the count of a small model, by hand") {
  const GptConfig model{.dim = 64, .layers = 2, .heads = 4, .context = 32};
  // A block: 3 x 64 x 64 for queries, keys and values, 64 x 64, and twice 4 x 64 x 64. The output layer: 256 x 64.
  CHECK(matrix_parameters(model) == 2 * (12'288 + 4'096 + 16'384 + 16'384) + 16'384);
  // Forward and backward: 3 x 2 operations a parameter; 3 x 2 x 2 x dim x context for attention, a layer.
  CHECK(training_flops_per_token(model) == 6 * 114'688 + 2 * 12 * 64 * 32);
}

TEST_CASE("every matrix of the model counts but the embeddings, and no vector") {
  for (const GptConfig& config :
       {GptConfig{.dim = 16, .layers = 3, .heads = 2, .context = 8}, GptConfig{.dim = 24, .layers = 1, .heads = 3}}) {
    Gpt model(config, /*seed=*/1);
    int64_t scalars = 0;
    for (const auto& item : model->named_parameters()) {
      const bool is_looked_up = item.key().find("embedding") != std::string::npos;
      scalars += item.value().dim() == 2 && !is_looked_up ? item.value().numel() : 0;
    }
    CHECK(matrix_parameters(config) == static_cast<double>(scalars));
  }
}

TEST_CASE("heads do not matter, and a large model does not overflow") {
  const GptConfig few{.dim = 12'288, .layers = 96, .heads = 1, .context = 2048};
  const GptConfig many{.dim = 12'288, .layers = 96, .heads = 96, .context = 2048};
  CHECK(training_flops_per_token(few) == training_flops_per_token(many));
  // GPT-3 is said to have 175 billion parameters (Brown et al. 2020, table 2.1), with a larger vocabulary.
  CHECK_THAT(matrix_parameters(many), WithinRel(174e9, 0.01));
  // 300 billion tokens: 3.14e23 operations (table D.1 there, without attention).
  CHECK_THAT(6 * matrix_parameters(many) * 300e9, WithinRel(3.14e23, 0.01));
}

}  // namespace
}  // namespace tessera::examples
