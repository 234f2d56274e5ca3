#pragma once
// Differences between the families of Hugging Face's decoders, one row per family. A new family that needs no new
// feature is a new row. Internal to this package. Immutable, so thread-safe.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/decoder_config.h"

namespace tessera::models {

enum class Bias { None, All, ByKey };  // ByKey: determined by a key of config.json
enum class Window {
  None,
  Always,   // sliding_window applies to all layers
  ByLayer,  // use_sliding_window, and layer_types or max_window_layers
  Pattern,  // layer_types, or every n-th layer attends to all tokens
  Switch,   // use_sliding_window says whether sliding_window applies to all layers
};
enum class Mixture {
  None,
  Always,   // num_local_experts of intermediate_size in all layers
  ByLayer,  // num_experts of moe_intermediate_size in all layers except mlp_only_layers; norm_topk_prob
};

struct Family {
  std::string_view model_type;
  std::string_view architecture;  // class name in transformers
  std::string_view activation_key = "hidden_act";
  NormKind norm = NormKind::Rms;
  std::string_view norm_eps_key = "rms_norm_eps";
  std::string_view query_bias_key = "attention_bias";  // for Bias::ByKey
  bool learned_positions = false;                      // for GPT-2, which also has other key names
  bool needs_head_dim = false;                         // if false, the default is hidden_size / num_attention_heads
  bool has_head_dim = true;                            // if false, there is no such key
  bool has_default_heads = false;                      // num_key_value_heads defaults to the number of heads
  bool sandwich_norms = false;                         // and final_logit_softcapping
  bool qk_norm = false;
  Bias query_bias = Bias::None;
  Bias output_bias = Bias::None;
  bool has_mlp_bias = false;
  Mixture mixture = Mixture::None;
  Window window = Window::None;
  int64_t full_every = 1;                            // for Window::Pattern
  bool has_query_scalar = false;                     // query_pre_attn_scalar
  bool has_score_softcap = false;                    // attn_logit_softcapping
  double rope_theta = 1e4;                           // default
  std::optional<double> partial_rotary_factor = {};  // default; none: whole heads are rotated
  bool has_local_rotary = false;                     // rope_parameters by layer type

  /// Returns whether this is a Gemma. Its embeddings are scaled, and by default tied; its default activation is
  /// approximate gelu.
  bool is_gemma() const { return norm == NormKind::OffsetRms; }
};

const std::vector<Family>& families();

/// Returns the row of a model_type, or null.
const Family* find_family(std::string_view model_type);

/// Returns the quoted model_types, for messages.
std::string supported_types();

}  // namespace tessera::models
