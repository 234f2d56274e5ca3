#pragma once
// Options of a decoder-only language model, read from and written to Hugging Face's config.json.
//
//   models::DecoderConfig config = models::read_config("llama/config.json");
//   config.num_hidden_layers = 2;
//   models::Decoder model(config);                                       // models/decoder.h
//
// The same options describe all families: gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma, gemma2,
// gemma3_text and stablelm. docs/models.md lists the keys that are read, ignored and refused.
// Pure functions on values; thread-safe.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::models {

/// Rotary position embedding: the contents of rope_parameters (transformers 5), or of rope_scaling and rope_theta (4).
struct RotaryConfig {
  enum class Type { Default, Linear, Dynamic, Llama3, Yarn };
  Type type = Type::Default;
  double theta = 10000;
  double factor = 1;
  double partial_rotary_factor = 1;              // fraction of a head's features that is rotated
  int64_t original_max_position_embeddings = 0;  // for llama3 and yarn
  double low_freq_factor = 1;                    // for llama3
  double high_freq_factor = 4;
  std::optional<double> attention_factor = {};  // for yarn
  double beta_fast = 32;
  double beta_slow = 1;
  double mscale = 0;
  double mscale_all_dim = 0;
  bool truncate = true;

  /// Returns the number of a head's leading features that are rotated.
  int64_t rotated_of(int64_t head_dim) const {
    return static_cast<int64_t>(static_cast<double>(head_dim) * partial_rotary_factor);
  }
  bool operator==(const RotaryConfig&) const = default;
};

enum class NormKind {
  Rms,        // weight * x / rms(x)
  OffsetRms,  // (1 + weight) * x / rms(x), all in float32, for Gemma
  Layer,
};
enum class Activation { Silu, Gelu, TanhGelu, Relu };

/// Mixture of experts that replaces the MLP in some layers.
struct MoeConfig {
  int64_t num_experts = 0;
  int64_t num_experts_per_tok = 0;
  int64_t intermediate_size = 0;        // per expert
  bool norm_topk_prob = true;           // divide a token's weights by their sum
  std::vector<bool> sparse = {};        // whether each layer has experts; empty: all have
  bool output_router_logits = false;    // keep the logits of a forward for router_aux_loss (decoder.h)
  double router_aux_loss_coef = 0.001;  // for router_aux_loss
  bool operator==(const MoeConfig&) const = default;
};

/// Describes a model. Names are those of config.json where possible.
struct DecoderConfig {
  std::string model_type = "llama";  // family: determines weight names, and keys of config.json
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;  // may be fewer than heads, which it must divide: each serves a group of queries
  int64_t head_dim = 0;             // may differ from hidden_size / num_attention_heads
  int64_t max_position_embeddings = 0;

  NormKind norm = NormKind::Rms;
  double norm_eps = 1e-6;
  bool sandwich_norms = false;  // also normalize after attention and MLP
  bool qk_norm = false;         // normalize each head's query and key

  std::optional<RotaryConfig> rotary = RotaryConfig();  // none: learned positions
  std::optional<RotaryConfig> local_rotary = {};        // for layers with a sliding window, if different

  bool query_bias = false;  // for query, key and value
  bool output_bias = false;
  bool mlp_bias = false;
  Activation activation = Activation::Silu;
  std::optional<MoeConfig> moe = {};
  bool gated_mlp = true;  // down(activation(gate(x)) * up(x)) instead of down(activation(up(x)))

  std::optional<int64_t> sliding_window = {};  // number of visible positions, including the token's own
  std::vector<bool> slides = {};               // by layer; empty: all of them if there is a window
  double attention_scale = 1;                  // factor of scores
  bool scale_by_layer = false;                 // divide the scale by the layer's number, from 1
  std::optional<double> attention_softcap = {};
  std::optional<double> logit_softcap = {};

  bool scale_embedding = false;  // multiply by sqrt(hidden_size)
  bool tie_word_embeddings = false;
  std::optional<int64_t> padding_idx = {};  // token whose embedding gets no gradient from lookups
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::string other_keys = "{}";  // JSON object: keys that do not affect the model, such as eos_token_id

  bool is_sliding(int64_t layer) const {
    return sliding_window && (slides.empty() || slides.at(static_cast<size_t>(layer)));
  }
  bool is_sparse(int64_t layer) const {
    return moe && (moe->sparse.empty() || moe->sparse.at(static_cast<size_t>(layer)));
  }
  bool operator==(const DecoderConfig&) const = default;
};

/// Throws ValueError, naming the field, unless a model can be built.
void check_config(const DecoderConfig& config);

/// Parses config.json, skipping `ignored_keys`. `file` is for messages. Throws ValueError, naming file, key, value and
/// what is allowed:
/// - for an unsupported model_type or value, or a missing key whose default would be a guess;
/// - for unknown keys that are not null, all of them at once, because they may affect the model.
DecoderConfig parse_config(std::string_view text, const std::string& file,
                           const std::vector<std::string>& ignored_keys = {});

/// Reads and parses a file. Throws CheckpointError if it cannot be read, and like parse_config.
DecoderConfig read_config(const std::string& file, const std::vector<std::string>& ignored_keys = {});

/// Returns the text of a config.json that transformers 4 and 5 read, and that parse_config converts back to `config`.
/// Throws ValueError if the family cannot express an option.
std::string format_config(const DecoderConfig& config);

}  // namespace tessera::models
