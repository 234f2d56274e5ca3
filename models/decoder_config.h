#pragma once
// Options of a decoder-only language model, read from and written to Hugging Face's config.json.
//
//   models::DecoderConfig config = models::read_config("llama/config.json");
//   config.num_hidden_layers = 2;
//   models::Decoder model(config);                                       // models/decoder.h
//
// The same options describe all families: gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma, gemma2,
// gemma3_text and stablelm.
// docs/models.md lists the keys: those that are read, those that do not matter here, and what is refused.
// Pure functions on values; thread-safe.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::models {

/// Describes rotary position embedding: the contents of rope_parameters (transformers 5) or rope_scaling and
/// rope_theta (4).
struct RotaryConfig {
  enum class Type { Default, Linear, Dynamic, Llama3, Yarn };
  Type type = Type::Default;
  double theta = 10000;
  double factor = 1;
  double partial_rotary_factor = 1;              // of a head's features
  int64_t original_max_position_embeddings = 0;  // llama3 and yarn
  double low_freq_factor = 1;                    // llama3
  double high_freq_factor = 4;
  std::optional<double> attention_factor = {};  // yarn
  double beta_fast = 32;
  double beta_slow = 1;
  double mscale = 0;
  double mscale_all_dim = 0;
  bool truncate = true;

  /// Returns how many of a head's features are rotated: its first ones.
  int64_t rotated_of(int64_t head_dim) const {
    return static_cast<int64_t>(static_cast<double>(head_dim) * partial_rotary_factor);
  }
  bool operator==(const RotaryConfig&) const = default;
};

enum class NormKind {
  Rms,        // weight * x / rms(x)
  OffsetRms,  // (1 + weight) * x / rms(x), all in float32, of Gemma
  Layer,
};
enum class Activation { Silu, Gelu, TanhGelu, Relu };

/// Describes the mixture of experts that some layers have in place of an MLP.
struct MoeConfig {
  int64_t num_experts = 0;
  int64_t num_experts_per_tok = 0;
  int64_t intermediate_size = 0;        // of each expert
  bool norm_topk_prob = true;           // divides a token's weights by their sum
  std::vector<bool> sparse = {};        // by layer, whether it has experts; empty: all have
  bool output_router_logits = false;    // keeps those of a forward, for router_aux_loss (decoder.h)
  double router_aux_loss_coef = 0.001;  // of router_aux_loss
  bool operator==(const MoeConfig&) const = default;
};

/// Describes a model. Names are config.json's where it has one.
struct DecoderConfig {
  std::string model_type = "llama";  // family: decides names of weights, and what config.json has
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;  // fewer than heads: each serves a group of queries; must divide heads
  int64_t head_dim = 0;             // need not be hidden_size / num_attention_heads
  int64_t max_position_embeddings = 0;

  NormKind norm = NormKind::Rms;
  double norm_eps = 1e-6;
  bool sandwich_norms = false;  // norms after attention and MLP too
  bool qk_norm = false;         // norms of each head's query and key

  std::optional<RotaryConfig> rotary = RotaryConfig();  // none: learned positions
  std::optional<RotaryConfig> local_rotary = {};        // of layers with a sliding window, if they differ

  bool query_bias = false;  // of query, key and value
  bool output_bias = false;
  bool mlp_bias = false;
  Activation activation = Activation::Silu;
  std::optional<MoeConfig> moe = {};
  bool gated_mlp = true;  // down(activation(gate(x)) * up(x)) rather than down(activation(up(x)))

  std::optional<int64_t> sliding_window = {};  // number of positions that are seen, the own one included
  std::vector<bool> slides = {};               // by layer; empty: all of them if there is a window
  double attention_scale = 1;                  // of scores
  bool scale_by_layer = false;                 // divides the scale by the layer's number, from 1
  std::optional<double> attention_softcap = {};
  std::optional<double> logit_softcap = {};

  bool scale_embedding = false;  // by sqrt(hidden_size)
  bool tie_word_embeddings = false;
  std::optional<int64_t> padding_idx = {};  // token whose embedding gets no gradient from lookups
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::string other_keys = "{}";  // JSON object: keys that do not matter here, such as eos_token_id

  bool is_sliding(int64_t layer) const {
    return sliding_window && (slides.empty() || slides.at(static_cast<size_t>(layer)));
  }
  bool is_sparse(int64_t layer) const {
    return moe && (moe->sparse.empty() || moe->sparse.at(static_cast<size_t>(layer)));
  }
  bool operator==(const DecoderConfig&) const = default;
};

/// Throws ValueError that names the field unless a model can be built.
void check_config(const DecoderConfig& config);

/// Parses config.json. `ignored_keys` are read past, whatever they mean. `file` is for messages. Throws ValueError that
/// names file, key, value and what is allowed:
/// - a model_type or value that is not supported, a missing key whose default would be a guess;
/// - unknown keys, all of them at once, unless they are null: they may change what the model computes.
DecoderConfig parse_config(std::string_view text, const std::string& file,
                           const std::vector<std::string>& ignored_keys = {});

/// Reads and parses a file. Throws CheckpointError if it cannot be read, and like parse_config.
DecoderConfig read_config(const std::string& file, const std::vector<std::string>& ignored_keys = {});

/// Returns the text of a config.json that transformers 4 and 5 read, and that parse_config turns into `config` again.
/// Throws ValueError if the family cannot express an option.
std::string format_config(const DecoderConfig& config);

}  // namespace tessera::models
