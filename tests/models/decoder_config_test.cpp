#include "models/decoder_config.h"

#include <cmath>

#include "checkpoint/format/checkpoint_error.h"
#include "testing/expect.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using models::DecoderConfig;
using models::parse_config;

/// A config of the family, with `more` keys after its own, of which the last with a name counts.
std::string llama_json(const std::string& more = "") {
  return R"({"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
             "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096,
             "hidden_act": "silu", "rms_norm_eps": 1e-05)" +
         more + "}";
}

std::string gemma2_json(const std::string& more = "") {
  return R"({"model_type": "gemma2", "vocab_size": 300, "hidden_size": 24, "intermediate_size": 40, "head_dim": 8,
             "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
             "max_position_embeddings": 64, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-06,
             "sliding_window": 4, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0,
             "final_logit_softcapping": 30.0)" +
         more + "}";
}

std::string mixtral_json(const std::string& more = "") {
  return R"({"model_type": "mixtral", "vocab_size": 300, "hidden_size": 24, "intermediate_size": 40,
             "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
             "max_position_embeddings": 64, "rms_norm_eps": 1e-05, "sliding_window": null, "num_local_experts": 8,
             "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02, "output_router_logits": true)" +
         more + "}";
}

std::string qwen3_moe_json(const std::string& more = "") {
  return R"({"model_type": "qwen3_moe", "vocab_size": 300, "hidden_size": 24, "intermediate_size": 40,
             "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
             "max_position_embeddings": 64, "rms_norm_eps": 1e-06, "head_dim": 8, "max_window_layers": 28,
             "sliding_window": null, "use_sliding_window": false, "num_experts": 6, "num_experts_per_tok": 2,
             "moe_intermediate_size": 10, "norm_topk_prob": true, "decoder_sparse_step": 2, "mlp_only_layers": [3, 9])" +
         more + "}";
}

void expect_refused(const std::string& json, const std::string& message) {
  expect_throws<ValueError>([&] { parse_config(json, "config.json"); }, message);
}

}  // namespace

TEST_CASE("a config of Llama 2 has the family's defaults") {
  const auto config = parse_config(llama_json(R"(, "bos_token_id": 1, "torch_dtype": "float16",
                                                 "rope_scaling": null, "pretraining_tp": 1)"),
                                   "config.json");
  CHECK(config == DecoderConfig{.model_type = "llama",
                                .vocab_size = 32000,
                                .hidden_size = 4096,
                                .intermediate_size = 11008,
                                .num_hidden_layers = 32,
                                .num_attention_heads = 32,
                                .num_key_value_heads = 32,
                                .head_dim = 128,
                                .max_position_embeddings = 4096,
                                .norm_eps = 1e-5,
                                .attention_scale = 1 / std::sqrt(128.0),
                                .dtype = at::kHalf,
                                .other_keys = R"({"bos_token_id":1,"pretraining_tp":1})"});
}

TEST_CASE("both styles of rotary parameters mean the same") {
  const std::string scaling = R"("factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                 "original_max_position_embeddings": 8192)";
  const auto old_style = parse_config(
      llama_json(R"(, "rope_theta": 500000.0, "rope_scaling": {"type": "llama3", )" + scaling + "}"), "config.json");
  const auto new_style = parse_config(
      llama_json(R"(, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, )" + scaling + "}"),
      "config.json");
  CHECK(old_style == new_style);
  CHECK(old_style.rotary == models::RotaryConfig{.type = models::RotaryConfig::Type::Llama3,
                                                 .theta = 500000,
                                                 .factor = 8,
                                                 .original_max_position_embeddings = 8192});
}

TEST_CASE("layers of Gemma 2 slide in turns") {
  const auto config = parse_config(gemma2_json(), "config.json");
  CHECK(config.slides == std::vector{true, false, true});
  CHECK(config.is_sliding(2));
  CHECK(config.attention_scale == 0.25);
  CHECK(config.attention_softcap == 50);
  CHECK(config.tie_word_embeddings);
  const auto listed = parse_config(
      gemma2_json(R"(, "layer_types": ["full_attention", "sliding_attention", "full_attention"])"), "config.json");
  CHECK(listed.slides == std::vector{false, true, false});
}

TEST_CASE("configs of mixtures of experts say which layers have how many experts") {
  const auto mixtral = parse_config(mixtral_json(), "config.json");
  CHECK(mixtral.moe == models::MoeConfig{.num_experts = 8,
                                         .num_experts_per_tok = 2,
                                         .intermediate_size = 40,
                                         .output_router_logits = true,
                                         .router_aux_loss_coef = 0.02});
  CHECK(mixtral.is_sparse(1));
  CHECK(mixtral.rotary->theta == 1e6);
  const auto qwen = parse_config(qwen3_moe_json(), "config.json");
  CHECK(qwen.moe == models::MoeConfig{.num_experts = 6,
                                      .num_experts_per_tok = 2,
                                      .intermediate_size = 10,
                                      .norm_topk_prob = true,
                                      .sparse = {false, true, false, false}});
  CHECK(!qwen.sliding_window);
  const auto sliding = parse_config(
      qwen3_moe_json(R"(, "use_sliding_window": true, "sliding_window": 4, "max_window_layers": 0)"), "config.json");
  CHECK(sliding.is_sliding(0));
  // The name of transformers 5.
  auto renamed = qwen3_moe_json();
  renamed.replace(renamed.find("num_experts\""), 12, "num_local_experts\"");
  CHECK(parse_config(renamed, "config.json") == qwen);
}

TEST_CASE("configs of mixtures of experts that are not supported are refused by key and value") {
  expect_refused(mixtral_json(R"(, "num_local_experts": 0)"), "num_local_experts is 0; it must be an integer from 1");
  expect_refused(mixtral_json(R"(, "num_local_experts": null)"), "num_local_experts is null; it must be an integer");
  expect_refused(mixtral_json(R"(, "num_experts": 4)"),
                 "num_experts is 4; it must be the same as num_local_experts, 8");
  expect_refused(mixtral_json(R"(, "num_experts_per_tok": 9)"),
                 "num_experts_per_tok is 9; it must be at most the number of experts, 8");
  expect_refused(mixtral_json(R"(, "router_aux_loss_coef": -1)"),
                 "router_aux_loss_coef is -1; it must be a number from");
  expect_refused(mixtral_json(R"(, "router_jitter_noise": 0.1)"), "router_jitter_noise is 0.1; it must be 0");
  expect_refused(mixtral_json(R"(, "moe_intermediate_size": 4)"), "unknown keys");
  expect_refused(qwen3_moe_json(R"(, "moe_intermediate_size": null)"), "moe_intermediate_size is null; it must be");
  expect_refused(qwen3_moe_json(R"(, "mlp_only_layers": 3)"), "mlp_only_layers is 3; it must be a list of layers");
  expect_refused(qwen3_moe_json(R"(, "mlp_only_layers": [-1])"),
                 "mlp_only_layers is [-1]; it must be a list of layers");
  expect_refused(qwen3_moe_json(R"(, "shared_expert_intermediate_size": 4)"), "shared_expert_intermediate_size (4)");
  expect_refused(qwen3_moe_json(R"(, "use_sliding_window": true, "sliding_window": 4)"),
                 "max_window_layers is 28; it must be 0 or left out beside use_sliding_window");
}

TEST_CASE("a config that is written reads as itself") {
  for (const auto& json : {llama_json(R"(, "eos_token_id": [1, 2], "mlp_bias": true, "head_dim": 64)"), gemma2_json(),
                           mixtral_json(), qwen3_moe_json(R"(, "mlp_only_layers": [])"), qwen3_moe_json(),
                           llama_json(R"(, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7})")}) {
    const auto config = parse_config(json, "config.json");
    auto again = parse_config(format_config(config), "again");
    CHECK(again.other_keys.find("architectures") != std::string::npos);
    again.other_keys = config.other_keys;
    CHECK(again == config);
  }
  auto config = parse_config(llama_json(), "config.json");
  config.logit_softcap = 30;
  expect_throws<ValueError>([&] { format_config(config); }, "the family \"llama\" cannot express");
  config.moe.emplace();
  expect_throws<ValueError>([&] { format_config(config); }, "the family llama has no experts");
}

TEST_CASE("configs that are not supported are refused by key and value") {
  expect_refused(R"({"model_type": "phi3"})", R"(config.json: model_type is "phi3"; it must be one of "gpt2")");
  expect_refused("{}", "config.json: model_type is missing");
  expect_refused("[1]", "config.json: is [1]; it must be an object");
  expect_refused("{", "config.json: no JSON");
  expect_refused(llama_json(R"(, "hidden_act": "quick_gelu")"), R"(hidden_act has "quick_gelu"; allowed are "silu")");
  expect_refused(llama_json(R"(, "hidden_size": -4)"), "hidden_size is -4; it must be an integer from 1");
  expect_refused(llama_json(R"(, "hidden_size": 18446744073709551615)"), "hidden_size is 18446744073709551615");
  expect_refused(llama_json(R"(, "num_hidden_layers": 1000000)"), "it must be an integer from 1 to 100000");
  expect_refused(llama_json(R"(, "num_attention_heads": 31)"), "head_dim is missing");
  expect_refused(llama_json(R"(, "num_key_value_heads": 5)"), "num_key_value_heads is 5; it must divide");
  expect_refused(llama_json(R"(, "rms_norm_eps": null)"), "rms_norm_eps is null; it must be a number above 0");
  expect_refused(llama_json(R"(, "dtype": "float8")"), R"(dtype has "float8"; allowed are "float32")");
  expect_refused(llama_json(R"(, "partial_rotary_factor": 0.5)"), "partial_rotary_factor is 0.5; it must be 1");
  expect_refused(llama_json(R"(, "rope_scaling": {"rope_type": "longrope", "factor": 2})"),
                 R"(config.json: rope_scaling.rope_type has "longrope"; allowed are "default", "linear")");
  expect_refused(llama_json(R"(, "rope_scaling": {"rope_type": "linear"})"), "rope_scaling.factor is missing");
  expect_refused(llama_json(R"(, "rope_scaling": {"rope_type": "linear", "factor": 2, "mscale": 1.0})"),
                 "config.json: rope_scaling.unknown keys, which may change what the model computes: mscale (1.0)");
  expect_refused(llama_json(R"(, "rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {})"),
                 "rope_scaling is {\"factor\":2,\"type\":\"linear\"}; it must be left out");
  expect_refused(llama_json(R"(, "is_encoder_decoder": true)"), "is_encoder_decoder is true; it must be false");
  expect_refused(llama_json(R"(, "sliding_window": 4, "zeta": [1], "gone": null)"),
                 "unknown keys, which may change what the model computes: sliding_window (4), zeta ([1])");
  expect_refused(gemma2_json(R"(, "sliding_window": null)"), "sliding_window is null; it must be set");
  expect_refused(gemma2_json(R"(, "layer_types": ["full_attention"])"), "a list with an entry for each of 3 layers");
  CHECK(parse_config(llama_json(R"(, "zeta": [1])"), "config.json", {"zeta"}) ==
        parse_config(llama_json(), "config.json"));
}

TEST_CASE("a config that nests deep is refused before it is parsed") {
  const std::string deep(100'000, '[');
  expect_throws<CheckpointError>([&] { parse_config(llama_json(R"(, "zeta": )" + deep), "config.json"); },
                                 "config.json: nested more than 32 deep");
}

}  // namespace tessera::testing
