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

Calls calls_of_a_step(const models::DecoderLayout& layout, bool with_logits) {
  models::Decoder model(grouped_config());
  models::lay_out(model, init_device_mesh(at::kCPU, {2}, {"tp"}), layout);
  const auto ids = at::arange(8).unsqueeze(0);
  const CommDebugMode mode(*model);
  (with_logits ? models::next_token_loss(model(ids), ids) : model->forward(ids, {.labels = ids})).backward();
  return {mode.calls(Collective::AllReduce), mode.calls(Collective::AllGather), mode.calls(Collective::ReduceScatter)};
}

}  // namespace

TEST_CASE("a layer communicates twice in forward and twice in backward, though keys are grouped") {
  run_ranks(2, [](int) {
    // Forward: embedding, 2 x 2 layers; logits are gathered. Backward: output layer, 2 x 2 layers.
    expect_equal(calls_of_a_step({}, true), Calls{5 + 5, 1, 0});
    // Each all-reduce is a pair of the others. Norms add 5 all-reduces, of their gradients.
    expect_equal(calls_of_a_step({.sequence_parallel = true}, true), Calls{5, 5 + 5 + 1, 5 + 5});
    // A loss without logits gathers none: two all-reduces of a number a row.
    expect_equal(calls_of_a_step({}, false), Calls{5 + 5 + 2, 0, 0});
    expect_equal(calls_of_a_step({.sequence_parallel = true}, false), Calls{5 + 2, 5 + 5, 5 + 5});
  });
}

TEST_CASE("a decoder refuses labels that it has no use for, and an output layer sharded by itself") {
  models::Decoder model(grouped_config());
  const auto ids = at::arange(8).unsqueeze(0);
  expect_throws<ValueError>([&] { model->forward(ids, {.labels = ids.narrow(1, 0, 7)}); }, "of the ids' sizes");
  expect_throws<ValueError>([&] { model->forward(ids, {.logits_to_keep = 1, .labels = ids}); }, "logits_to_keep");
  run_ranks(2, [&](int) {
    auto config = grouped_config();
    config.tie_word_embeddings = false;
    models::Decoder sharded(config);
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    fully_shard(*sharded->lm_head, {.mesh = mesh});
    fully_shard(sharded, {.mesh = mesh});
    expect_throws<StateError>([&] { sharded->forward(ids, {.labels = ids}); }, "sharded over the axes [dp]");
  });
}

}  // namespace tessera::testing
