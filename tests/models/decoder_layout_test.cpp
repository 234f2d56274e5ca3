#include "models/decoder_layout.h"

#include <ATen/ops/arange.h>

#include <array>

#include "debug/comm_debug_mode.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

models::DecoderConfig grouped_config() {
  return {.vocab_size = 20,
          .hidden_size = 12,
          .intermediate_size = 16,
          .num_hidden_layers = 2,
          .num_attention_heads = 4,
          .num_key_value_heads = 2,
          .head_dim = 6,
          .max_position_embeddings = 8,
          .attention_scale = 0.4,
          .tie_word_embeddings = true};
}

/// Numbers of all-reduces, all-gathers and reduce-scatters.
using Calls = std::array<int64_t, 3>;

Calls calls_of_a_step(const models::DecoderLayout& layout) {
  models::Decoder model(grouped_config());
  models::lay_out(model, init_device_mesh(at::kCPU, {2}, {"tp"}), layout);
  const auto ids = at::arange(8).unsqueeze(0);
  const CommDebugMode mode(*model);
  models::next_token_loss(model(ids), ids).backward();
  return {mode.calls(Collective::AllReduce), mode.calls(Collective::AllGather), mode.calls(Collective::ReduceScatter)};
}

}  // namespace

TEST_CASE("a layer communicates twice in forward and twice in backward, though keys are grouped") {
  run_ranks(2, [](int) {
    // Forward: embedding, 2 x 2 layers; logits are gathered. Backward: output layer, 2 x 2 layers.
    expect_equal(calls_of_a_step({}), Calls{5 + 5, 1, 0});
    // Each all-reduce is a pair of the others. Norms add 5 all-reduces, of their gradients.
    expect_equal(calls_of_a_step({.sequence_parallel = true}), Calls{5, 5 + 5 + 1, 5 + 5});
  });
}

}  // namespace tessera::testing
