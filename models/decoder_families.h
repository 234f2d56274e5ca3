#pragma once
// Differences between the families of Hugging Face's decoders, a row each. A family that needs nothing new is a row
// more. Internal to this package. Immutable, so thread-safe.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/decoder_config.h"

namespace tessera::models {

enum class Bias { None, All, ByKey };  // ByKey: a key of config.json says it
enum class Window {
  None,
  Always,   // sliding_window is of all layers
  ByLayer,  // use_sliding_window, and layer_types or max_window_layers
  Pattern,  // layer_types, or every n-th layer sees all
  Switch,   // use_sliding_window says whether sliding_window is of all layers
};
enum class Mixture {
  None,
  Always,   // num_local_experts of intermediate_size in all layers
  ByLayer,  // num_experts of moe_intermediate_size in all layers but mlp_only_layers; norm_topk_prob
};

struct Family {
  std::string_view model_type;
  std::string_view architecture;  // class of transformers
  std::string_view activation_key = "hidden_act";
  NormKind norm = NormKind::Rms;
  std::string_view norm_eps_key = "rms_norm_eps";
  std::string_view query_bias_key = "attention_bias";  // of Bias::ByKey
  bool learned_positions = false;                      // of GPT-2, whose keys have other names too
  bool needs_head_dim = false;     // otherwise hidden_size / num_attention_heads, unless there is head_dim
  bool has_head_dim = true;        // otherwise there is no such key
  bool has_default_heads = false;  // without num_key_value_heads there are as many as heads
  bool sandwich_norms = false;     // and final_logit_softcapping
  bool qk_norm = false;
  Bias query_bias = Bias::None;
  Bias output_bias = Bias::None;
  bool has_mlp_bias = false;
  Mixture mixture = Mixture::None;
  Window window = Window::None;
  int64_t full_every = 1;                            // of Window::Pattern
  bool has_query_scalar = false;                     // query_pre_attn_scalar
  bool has_score_softcap = false;                    // attn_logit_softcapping
  double rope_theta = 1e4;                           // default
  std::optional<double> partial_rotary_factor = {};  // default; none: heads are rotated whole
  bool has_local_rotary = false;                     // rope_parameters by layer type

  /// Gemma's embeddings are scaled, and tied by default; its activation is gelu's approximation by default.
  bool is_gemma() const { return norm == NormKind::OffsetRms; }
};

const std::vector<Family>& families();

/// Returns null for a model_type without a row.
const Family* find_family(std::string_view model_type);

/// Returns the quoted model_types, for messages.
std::string supported_types();

}  // namespace tessera::models
