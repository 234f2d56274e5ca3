#include "models/decoder_families.h"

#include <fmt/ranges.h>

#include <algorithm>

namespace tessera::models {

const std::vector<Family>& families() {
  static const std::vector<Family> all = {
      {.model_type = "gpt2",
       .architecture = "GPT2LMHeadModel",
       .activation_key = "activation_function",
       .norm = NormKind::Layer,
       .learned_positions = true},
      {.model_type = "llama",
       .architecture = "LlamaForCausalLM",
       .has_default_heads = true,
       .query_bias = Bias::ByKey,
       .output_bias = Bias::ByKey,
       .has_mlp_bias = true},
      {.model_type = "mistral", .architecture = "MistralForCausalLM", .window = Window::Always},
      {.model_type = "mixtral",
       .architecture = "MixtralForCausalLM",
       .mixture = Mixture::Always,
       .window = Window::Always,
       .rope_theta = 1e6},
      {.model_type = "qwen2", .architecture = "Qwen2ForCausalLM", .query_bias = Bias::All, .window = Window::ByLayer},
      {.model_type = "qwen3",
       .architecture = "Qwen3ForCausalLM",
       .needs_head_dim = true,
       .qk_norm = true,
       .query_bias = Bias::ByKey,
       .output_bias = Bias::ByKey,
       .window = Window::ByLayer},
      {.model_type = "qwen3_moe",
       .architecture = "Qwen3MoeForCausalLM",
       .qk_norm = true,
       .query_bias = Bias::ByKey,
       .output_bias = Bias::ByKey,
       .mixture = Mixture::ByLayer,
       .window = Window::Switch},
      {.model_type = "gemma",
       .architecture = "GemmaForCausalLM",
       .norm = NormKind::OffsetRms,
       .needs_head_dim = true,
       .query_bias = Bias::ByKey,
       .output_bias = Bias::ByKey},
      {.model_type = "gemma2",
       .architecture = "Gemma2ForCausalLM",
       .activation_key = "hidden_activation",
       .norm = NormKind::OffsetRms,
       .needs_head_dim = true,
       .sandwich_norms = true,
       .query_bias = Bias::ByKey,
       .output_bias = Bias::ByKey,
       .window = Window::Pattern,
       .full_every = 2,
       .has_query_scalar = true,
       .has_score_softcap = true},
      {.model_type = "gemma3_text",
       .architecture = "Gemma3ForCausalLM",
       .activation_key = "hidden_activation",
       .norm = NormKind::OffsetRms,
       .needs_head_dim = true,
       .sandwich_norms = true,
       .qk_norm = true,
       .query_bias = Bias::ByKey,
       .output_bias = Bias::ByKey,
       .window = Window::Pattern,
       .full_every = 6,
       .has_query_scalar = true,
       .rope_theta = 1e6,
       .has_local_rotary = true},
      {.model_type = "stablelm",
       .architecture = "StableLmForCausalLM",
       .norm = NormKind::Layer,
       .norm_eps_key = "layer_norm_eps",
       .query_bias_key = "use_qkv_bias",
       .has_head_dim = false,
       .query_bias = Bias::ByKey,
       .partial_rotary_factor = 0.25},
  };
  return all;
}

const Family* find_family(std::string_view model_type) {
  const auto found = std::ranges::find(families(), model_type, &Family::model_type);
  return found == families().end() ? nullptr : &*found;
}

std::string supported_types() {
  std::vector<std::string_view> types;
  std::ranges::transform(families(), std::back_inserter(types), &Family::model_type);
  return fmt::format("\"{}\"", fmt::join(types, "\", \""));
}

}  // namespace tessera::models
