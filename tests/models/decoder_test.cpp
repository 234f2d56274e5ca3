#include "models/decoder.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

#include "fully_shard/to_empty.h"
#include "nn/meta_device.h"
#include "nn/reset_parameters.h"
#include "testing/expect.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

models::DecoderConfig small_config() {
  return {.vocab_size = 20,
          .hidden_size = 12,
          .intermediate_size = 16,
          .num_hidden_layers = 1,
          .num_attention_heads = 2,
          .num_key_value_heads = 1,
          .head_dim = 6,
          .max_position_embeddings = 8,
          .attention_scale = 1 / std::sqrt(6.0)};
}

/// Returns the positions whose logits change with the token at `position`.
std::vector<int64_t> affected_by(models::Decoder& model, int64_t position) {
  const auto ids = at::arange(8).unsqueeze(0);
  auto changed = ids.clone();
  changed[0][position] = 19;
  const auto before = model(ids), after = model(changed);
  std::vector<int64_t> affected;
  for (int64_t i = 0; i < 8; ++i) {
    if (!at::equal(before[0][i], after[0][i])) {
      affected.push_back(i);
    }
  }
  return affected;
}

}  // namespace

TEST_CASE("a token affects itself and later ones, as far as the window reaches") {
  auto config = small_config();
  models::Decoder model(config);
  CHECK(affected_by(model, 3) == std::vector<int64_t>{3, 4, 5, 6, 7});
  config.sliding_window = 3;
  models::Decoder sliding(config);
  CHECK(affected_by(sliding, 3) == std::vector<int64_t>{3, 4, 5});
  config.attention_softcap = 2;
  models::Decoder capped(config);
  CHECK(affected_by(capped, 3) == std::vector<int64_t>{3, 4, 5});
  config.sliding_window.reset();
  models::Decoder wide(config);
  CHECK(affected_by(wide, 3) == std::vector<int64_t>{3, 4, 5, 6, 7});
}

TEST_CASE("a tied output layer is one parameter with the embedding") {
  auto config = small_config();
  models::Decoder untied(config);
  config.tie_word_embeddings = true;
  models::Decoder tied(config);
  CHECK(untied->named_parameters().contains("lm_head.weight"));
  CHECK(!tied->named_parameters().contains("lm_head.weight"));
  // Token 19 is not among the ids: its gradient is the output layer's.
  models::next_token_loss(tied(at::arange(8).unsqueeze(0)), at::arange(8).unsqueeze(0)).backward();
  CHECK(tied->embed_tokens->weight.grad()[19].abs().max().item<double>() > 0);
}

TEST_CASE("a decoder without memory gets initial values") {
  auto config = small_config();
  config.norm = models::NormKind::OffsetRms;
  models::Decoder model{nullptr};
  {
    const MetaDeviceGuard on_meta;
    model = models::Decoder(config);
  }
  to_empty(model, at::kCPU);
  for (auto& parameter : model->parameters()) {
    parameter.detach().fill_(std::numeric_limits<float>::quiet_NaN());
  }
  reset_parameters(model);
  CHECK(at::equal(model->norm->weight.detach(), at::zeros({12})));
  CHECK(model(at::arange(8).unsqueeze(0)).isfinite().all().item<bool>());
}

TEST_CASE("labels of -100 do not count") {
  models::Decoder model(small_config());
  const auto ids = at::arange(8).unsqueeze(0);
  auto labels = ids.clone();
  labels.narrow(1, 4, 4).fill_(-100);
  expect_close(models::next_token_loss(model(ids), labels),
               models::next_token_loss(model(ids.narrow(1, 0, 4)), ids.narrow(1, 0, 4)));
}

TEST_CASE("losses that are divided by a common count add up to the loss of the whole batch") {
  models::Decoder model(small_config());
  const auto ids = at::arange(16).view({2, 8});
  auto labels = ids.clone();
  labels[0].narrow(0, 2, 6).fill_(-100);  // one label counts in the first row, seven in the second
  const auto part = [&](int64_t row) {
    return models::next_token_loss(model(ids.narrow(0, row, 1)), labels.narrow(0, row, 1), /*count=*/8);
  };
  expect_close(part(0) + part(1), models::next_token_loss(model(ids), labels));
  labels.fill_(-100);
  CHECK(models::next_token_loss(model(ids), labels, 8).item<double>() == 0);
}

TEST_CASE("decoders refuse what they cannot compute") {
  auto config = small_config();
  models::Decoder model(config);
  expect_throws<ValueError>([&] { model(at::arange(8)); }, "ids have 1 dims; give [batch, length]");
  config.head_dim = 5;
  expect_throws<ValueError>([&] { models::Decoder{config}; }, "head_dim is 5, of which 5 features have rotary");
  config.head_dim = 6;
  config.rotary->partial_rotary_factor = 0.5;
  expect_throws<ValueError>([&] { models::Decoder{config}; }, "head_dim is 6, of which 3 features have rotary");
  config = small_config();
  config.num_attention_heads = 0;
  expect_throws<ValueError>([&] { models::Decoder{config}; }, "num_attention_heads is 0; it must be from 1");
  config = small_config();
  config.model_type = "gpt2";
  config.rotary.reset();
  models::Decoder learned(config);
  expect_throws<ValueError>([&] { learned(at::arange(9).unsqueeze(0)); }, "9 tokens, but the model has 8 learned");
}

}  // namespace tessera::testing
