#include "models/decoder_config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/error.h"
#include "checkpoint/format/json_text.h"
#include "checkpoint/io/file_io.h"

namespace tessera::models {

namespace {

using nlohmann::json;

constexpr uint64_t kMaxConfigBytes = uint64_t{16} << 20;
constexpr int kMaxConfigDepth = 32;
constexpr int64_t kMaxSize = int64_t{1} << 31;  // products of two sizes fit 64 bits
constexpr int64_t kMaxLayers = 100'000;

template <class T>
using Names = std::vector<std::pair<std::string_view, T>>;  // the first name of a value is the one that is written

const Names<c10::ScalarType> kDtypes = {{"float32", c10::ScalarType::Float},
                                        {"bfloat16", c10::ScalarType::BFloat16},
                                        {"float16", c10::ScalarType::Half},
                                        {"float64", c10::ScalarType::Double}};
const Names<Activation> kActivations = {{"silu", Activation::Silu},         {"swish", Activation::Silu},
                                        {"gelu", Activation::Gelu},         {"gelu_pytorch_tanh", Activation::TanhGelu},
                                        {"gelu_new", Activation::TanhGelu}, {"relu", Activation::Relu}};
// Gemma's first checkpoints say gelu and mean its approximation, as transformers has it too.
const Names<Activation> kGemmaActivations = {{"gelu_pytorch_tanh", Activation::TanhGelu},
                                             {"gelu", Activation::TanhGelu}};
const Names<RotaryConfig::Type> kRotaryTypes = {{"default", RotaryConfig::Type::Default},
                                                {"linear", RotaryConfig::Type::Linear},
                                                {"dynamic", RotaryConfig::Type::Dynamic},
                                                {"llama3", RotaryConfig::Type::Llama3},
                                                {"yarn", RotaryConfig::Type::Yarn}};
const Names<bool> kLayerTypes = {{"full_attention", false}, {"sliding_attention", true}};

template <class T>
std::string_view name_of(const Names<T>& names, T value) {
  return std::ranges::find(names, value, &std::pair<std::string_view, T>::second)->first;
}

enum class Bias { None, All, ByKey };
enum class Window {
  None,
  Always,   // sliding_window is of all layers
  ByLayer,  // use_sliding_window, and layer_types or max_window_layers
  Pattern,  // layer_types, or every n-th layer sees all
};

/// What the families with rotary positions differ in.
struct Family {
  std::string_view model_type;
  std::string_view architecture;
  std::string_view activation_key = "hidden_act";
  NormKind norm = NormKind::Rms;  // OffsetRms: Gemma's other peculiarities too
  bool sandwich_norms = false;
  bool qk_norm = false;
  Bias query_bias = Bias::None;
  Bias output_bias = Bias::None;
  bool has_mlp_bias = false;
  Window window = Window::None;
  int64_t full_every = 1;          // of Window::Pattern
  bool has_query_scalar = false;   // query_pre_attn_scalar
  bool has_score_softcap = false;  // attn_logit_softcapping
  bool has_local_rotary = false;   // rope_parameters by layer type
  bool has_default_heads = false;  // without num_key_value_heads there are as many as heads
};

bool is_gemma(const Family& family) {
  return family.norm == NormKind::OffsetRms;
}

const std::vector<Family>& families() {
  static const std::vector<Family> all = {
      {.model_type = "llama",
       .architecture = "LlamaForCausalLM",
       .query_bias = Bias::ByKey,
       .output_bias = Bias::ByKey,
       .has_mlp_bias = true,
       .has_default_heads = true},
      {.model_type = "mistral", .architecture = "MistralForCausalLM", .window = Window::Always},
      {.model_type = "qwen2", .architecture = "Qwen2ForCausalLM", .query_bias = Bias::All, .window = Window::ByLayer},
      {.model_type = "qwen3",
       .architecture = "Qwen3ForCausalLM",
       .qk_norm = true,
       .query_bias = Bias::ByKey,
       .output_bias = Bias::ByKey,
       .window = Window::ByLayer},
      {.model_type = "gemma",
       .architecture = "GemmaForCausalLM",
       .norm = NormKind::OffsetRms,
       .query_bias = Bias::ByKey,
       .output_bias = Bias::ByKey},
      {.model_type = "gemma2",
       .architecture = "Gemma2ForCausalLM",
       .activation_key = "hidden_activation",
       .norm = NormKind::OffsetRms,
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
       .sandwich_norms = true,
       .qk_norm = true,
       .query_bias = Bias::ByKey,
       .output_bias = Bias::ByKey,
       .window = Window::Pattern,
       .full_every = 6,
       .has_query_scalar = true,
       .has_local_rotary = true},
  };
  return all;
}

const Family* find_family(std::string_view model_type) {
  const auto found = std::ranges::find(families(), model_type, &Family::model_type);
  return found == families().end() ? nullptr : &*found;
}

// Keys that change nothing that this package computes. Dropout is not applied.
constexpr std::array kHarmlessKeys = std::to_array<std::string_view>(
    {"_name_or_path", "architectures", "attention_dropout", "attn_implementation", "attn_pdrop", "bos_token_id",
     "cache_implementation", "chunk_size_feed_forward", "embd_pdrop", "eos_token_id", "gradient_checkpointing",
     "id2label", "initializer_range", "label2id", "n_ctx", "num_labels", "output_attentions", "output_hidden_states",
     "pretraining_tp", "problem_type", "resid_pdrop", "return_dict", "summary_activation", "summary_first_dropout",
     "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params", "torchscript",
     "transformers_version", "use_bfloat16", "use_cache",
     // Of generation.
     "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
     "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
     "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size", "num_beam_groups",
     "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty",
     "return_dict_in_generate", "suppress_tokens", "temperature", "tokenizer_class", "top_k", "top_p", "typical_p"});

// Keys that name features of other models, by the value that turns them off.
const std::vector<std::pair<std::string_view, json>> kSwitchedOff = {
    {"is_encoder_decoder", false},          {"add_cross_attention", false}, {"tie_encoder_decoder", false},
    {"use_bidirectional_attention", false}, {"use_mrope", false},           {"reorder_and_upcast_attn", false},
    {"pruned_heads", json::object()},       {"is_decoder", false}};

/// What a message has of a value, which may be as long as the file.
std::string shown(const json& value) {
  std::string text = value.dump();
  if (text.size() > 80) {
    text.resize(80);
    text += "...";
  }
  return text;
}

/// Reads keys of an object, and knows which have been read.
class KeyReader {
 public:
  /// `place` is where the object is, for messages: "config.json: ", "config.json: rope_scaling.".
  KeyReader(const json& object, std::string place) : object_(object), place_(std::move(place)) {}

  [[noreturn]] void fail(std::string_view key, const std::string& allowed) const {
    const auto found = object_.find(key);
    throw ValueError(found == object_.end()
                         ? fmt::format("{}{} is missing; it must be {}", place_, key, allowed)
                         : fmt::format("{}{} is {}; it must be {}", place_, key, shown(*found), allowed));
  }

  /// Returns null for a missing key, and for null.
  const json* find(std::string_view key) {
    read_.emplace(key);
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  bool has(std::string_view key) const { return object_.contains(key); }

  std::optional<int64_t> find_integer(std::string_view key, int64_t least = 1, int64_t most = kMaxSize) {
    const json* const value = find(key);
    if (!value) {
      return std::nullopt;
    }
    if (!value->is_number_integer() || value->get<double>() < static_cast<double>(least) ||
        value->get<double>() > static_cast<double>(most)) {
      fail(key, fmt::format("an integer from {} to {}", least, most));
    }
    return value->get<int64_t>();
  }
  int64_t integer(std::string_view key, int64_t most = kMaxSize) {
    const auto value = find_integer(key, 1, most);
    return value ? *value : (fail(key, fmt::format("an integer from 1 to {}", most)), 0);
  }

  std::optional<double> find_number(std::string_view key) {
    const json* const value = find(key);
    if (value && (!value->is_number() || !(value->get<double>() > 0))) {
      fail(key, "a number above 0");
    }
    return value ? std::optional(value->get<double>()) : std::nullopt;
  }
  double number(std::string_view key) {
    const auto value = find_number(key);
    return value ? *value : (fail(key, "a number above 0"), 0);
  }

  bool boolean(std::string_view key, bool otherwise) {
    const json* const value = find(key);
    if (value && !value->is_boolean()) {
      fail(key, "true or false");
    }
    return value ? value->get<bool>() : otherwise;
  }

  template <class T>
  T named(std::string_view key, const json& value, const Names<T>& names) const {
    if (value.is_string()) {
      for (const auto& [name, result] : names) {
        if (name == value.get_ref<const std::string&>()) {
          return result;
        }
      }
    }
    std::vector<std::string_view> allowed;
    std::ranges::transform(names, std::back_inserter(allowed), &std::pair<std::string_view, T>::first);
    throw ValueError(
        fmt::format("{}{} has {}; allowed are \"{}\"", place_, key, shown(value), fmt::join(allowed, "\", \"")));
  }
  template <class T>
  T named(std::string_view key, const Names<T>& names, std::optional<T> otherwise) {
    const json* const value = find(key);
    if (!value && otherwise) {
      return *otherwise;
    }
    return named(key, value ? *value : json(), names);
  }

  /// Throws if keys are left that are neither read nor null.
  void check_all_read(const std::string& remedy) const {
    std::vector<std::string> left;
    for (const auto& [key, value] : object_.items()) {
      if (!read_.contains(key) && !value.is_null()) {
        left.push_back(fmt::format("{} ({})", key, shown(value)));
      }
    }
    TESSERA_CHECK(ValueError, left.empty(), "{}unknown keys, which may change what the model computes: {}. {}", place_,
                  fmt::join(left, ", "), remedy);
  }

  const json& object() const { return object_; }
  const std::string& place() const { return place_; }

 private:
  const json& object_;
  std::string place_;
  std::set<std::string, std::less<>> read_;
};

/// Reads rope_parameters, or rope_scaling, with the defaults that stand beside it.
RotaryConfig read_rotary(const json* object, const KeyReader& whole, std::string_view key, double theta,
                         int64_t max_positions) {
  RotaryConfig rotary{.theta = theta, .original_max_position_embeddings = 0};
  if (!object) {
    return rotary;
  }
  if (!object->is_object()) {
    whole.fail(key, "an object, or null");
  }
  KeyReader reader(*object, fmt::format("{}{}.", whole.place(), key));
  rotary.theta = reader.find_number("rope_theta").value_or(theta);
  const bool has_type = reader.find("rope_type") != nullptr;
  reader.find("type");  // its old name
  rotary.type = reader.named(has_type ? "rope_type" : "type", kRotaryTypes, std::optional(RotaryConfig::Type::Default));
  if (const json* part = reader.find("partial_rotary_factor"); part && *part != json(1)) {
    reader.fail("partial_rotary_factor", "1: heads of these families are rotated whole");
  }
  const bool is_yarn = rotary.type == RotaryConfig::Type::Yarn, is_llama3 = rotary.type == RotaryConfig::Type::Llama3;
  if (is_yarn || is_llama3) {
    rotary.original_max_position_embeddings =
        reader.find_integer("original_max_position_embeddings").value_or(max_positions);
  }
  if (is_yarn && reader.has("factor") && !reader.find("factor")) {  // null: what the lengths say
    rotary.factor = static_cast<double>(max_positions) / static_cast<double>(rotary.original_max_position_embeddings);
  } else if (rotary.type != RotaryConfig::Type::Default) {
    rotary.factor = reader.number("factor");
  }
  if (is_llama3) {
    rotary.low_freq_factor = reader.number("low_freq_factor");
    rotary.high_freq_factor = reader.number("high_freq_factor");
    if (rotary.high_freq_factor == rotary.low_freq_factor) {
      reader.fail("high_freq_factor", "another number than low_freq_factor");
    }
  }
  if (is_yarn) {
    rotary.attention_factor = reader.find_number("attention_factor");
    rotary.beta_fast = reader.find_number("beta_fast").value_or(32);
    rotary.beta_slow = reader.find_number("beta_slow").value_or(1);
    rotary.mscale = reader.find_number("mscale").value_or(0);
    rotary.mscale_all_dim = reader.find_number("mscale_all_dim").value_or(0);
    rotary.truncate = reader.boolean("truncate", true);
  }
  reader.check_all_read(
      fmt::format("Remove them, or name another rope_type than \"{}\"", name_of(kRotaryTypes, rotary.type)));
  return rotary;
}

/// Reads both styles: rope_parameters of transformers 5, and rope_theta with rope_scaling of 4.
void read_rotaries(DecoderConfig& config, KeyReader& reader, const Family& family) {
  const json* const parameters = reader.find("rope_parameters");
  const json* const scaling = reader.find("rope_scaling");
  if (parameters && scaling) {
    reader.fail("rope_scaling", "left out, or null, beside rope_parameters");
  }
  const double theta = reader.find_number("rope_theta").value_or(family.has_local_rotary ? 1e6 : 1e4);
  const auto read = [&](const json* object, std::string_view key, double own_theta) {
    return read_rotary(object, reader, key, own_theta, config.max_position_embeddings);
  };
  if (const json* part = reader.find("partial_rotary_factor"); part && *part != json(1)) {
    reader.fail("partial_rotary_factor", "1: heads of these families are rotated whole");
  }
  if (!family.has_local_rotary) {
    config.rotary = parameters ? read(parameters, "rope_parameters", theta) : read(scaling, "rope_scaling", theta);
    return;
  }
  const double local_theta = reader.find_number("rope_local_base_freq").value_or(1e4);
  if (!parameters) {
    config.rotary = read(scaling, "rope_scaling", theta);
    config.local_rotary = RotaryConfig{.theta = local_theta};
    return;
  }
  if (!parameters->is_object()) {
    reader.fail("rope_parameters", "an object, or null");
  }
  KeyReader by_type(*parameters, reader.place() + "rope_parameters.");
  config.rotary = read(by_type.find("full_attention"), "rope_parameters.full_attention", theta);
  config.local_rotary = read(by_type.find("sliding_attention"), "rope_parameters.sliding_attention", local_theta);
  by_type.check_all_read("Allowed are full_attention and sliding_attention");
  for (const auto* rotary : {&*config.rotary, &*config.local_rotary}) {
    TESSERA_CHECK(ValueError, rotary->truncate,
                  "{}rope_parameters has truncate = false by layer type, which transformers does not read there; it "
                  "must be true",
                  reader.place());
  }
}

/// Returns by layer whether it slides.
std::vector<bool> read_layer_types(KeyReader& reader, int64_t layers) {
  std::vector<bool> slides;
  const json* const types = reader.find("layer_types");
  if (!types) {
    return slides;
  }
  if (!types->is_array() || types->size() != static_cast<size_t>(layers)) {
    reader.fail("layer_types", fmt::format("a list with an entry for each of {} layers", layers));
  }
  for (const auto& type : *types) {
    slides.push_back(reader.named("layer_types", type, kLayerTypes));
  }
  return slides;
}

void read_windows(DecoderConfig& config, KeyReader& reader, const Family& family) {
  const int64_t layers = config.num_hidden_layers;
  if (family.window == Window::None) {
    return;
  }
  if (!reader.has("sliding_window")) {
    reader.fail("sliding_window", "a number of positions, or null for all");
  }
  config.sliding_window = reader.find_integer("sliding_window");
  if (family.window == Window::Always) {
    return;
  }
  config.slides = read_layer_types(reader, layers);
  if (family.window == Window::ByLayer) {
    const int64_t first = reader.find_integer("max_window_layers", 0).value_or(28);
    if (!reader.boolean("use_sliding_window", false)) {
      config.sliding_window.reset();
    }
    for (int64_t layer = 0; config.slides.size() < static_cast<size_t>(layers); ++layer) {
      config.slides.push_back(config.sliding_window && layer >= first);
    }
  } else {
    int64_t every = family.full_every;
    if (family.has_local_rotary) {
      every = reader.find_integer("sliding_window_pattern").value_or(every);
      reader.find("_sliding_window_pattern");  // the same, beside layer_types
    }
    for (int64_t layer = 0; config.slides.size() < static_cast<size_t>(layers); ++layer) {
      config.slides.push_back((layer + 1) % every != 0);
    }
  }
  const bool any_slides = std::ranges::find(config.slides, true) != config.slides.end();
  if (any_slides && !config.sliding_window) {
    reader.fail(reader.find("sliding_window") ? "use_sliding_window" : "sliding_window",
                "set, as layers of sliding_attention need a window");
  }
  if (!any_slides && family.window == Window::ByLayer) {
    config.sliding_window.reset();
  }
}

int64_t read_head_dim(const DecoderConfig& config, KeyReader& reader, bool required) {
  if (const auto given = reader.find_integer("head_dim")) {
    return *given;
  }
  if (required || config.hidden_size % config.num_attention_heads != 0) {
    reader.fail("head_dim", fmt::format("given: {}", required ? "the family has no default"
                                                              : "num_attention_heads does not divide hidden_size"));
  }
  return config.hidden_size / config.num_attention_heads;
}

void read_activation(DecoderConfig& config, KeyReader& reader, const Family& family) {
  if (!is_gemma(family)) {
    config.activation = reader.named(family.activation_key, kActivations, std::optional<Activation>());
    return;
  }
  const auto& names = family.model_type == "gemma" ? kGemmaActivations : kActivations;
  // Configs of Gemma have both keys, of which one is the family's.
  const bool is_first = family.activation_key == "hidden_act";
  config.activation = reader.named(family.activation_key, names, std::optional(Activation::TanhGelu));
  const std::string_view unused = is_first ? "hidden_activation" : "hidden_act";
  if (reader.named(unused, names, std::optional(config.activation)) != config.activation) {
    reader.fail(unused, fmt::format("the same as {}, or left out", family.activation_key));
  }
}

void read_rotary_family(DecoderConfig& config, KeyReader& reader, const Family& family) {
  config.hidden_size = reader.integer("hidden_size");
  config.intermediate_size = reader.integer("intermediate_size");
  config.num_hidden_layers = reader.integer("num_hidden_layers", kMaxLayers);
  config.num_attention_heads = reader.integer("num_attention_heads");
  if (!reader.has("num_key_value_heads") && !family.has_default_heads) {
    reader.fail("num_key_value_heads", "a divisor of num_attention_heads, or null for as many");
  }
  config.num_key_value_heads = reader.find_integer("num_key_value_heads").value_or(config.num_attention_heads);
  config.max_position_embeddings = reader.integer("max_position_embeddings");
  config.head_dim = read_head_dim(config, reader, is_gemma(family) || family.model_type == "qwen3");
  config.norm = family.norm;
  config.norm_eps = reader.number("rms_norm_eps");
  config.sandwich_norms = family.sandwich_norms;
  config.qk_norm = family.qk_norm;
  const auto bias = [&](Bias bias) {
    return bias == Bias::All || (bias == Bias::ByKey && reader.boolean("attention_bias", false));
  };
  config.query_bias = bias(family.query_bias);
  config.output_bias = bias(family.output_bias);
  config.mlp_bias = family.has_mlp_bias && reader.boolean("mlp_bias", false);
  read_activation(config, reader, family);
  read_windows(config, reader, family);
  read_rotaries(config, reader, family);
  const int64_t scalar = family.has_query_scalar ? reader.integer("query_pre_attn_scalar") : config.head_dim;
  config.attention_scale = 1 / std::sqrt(static_cast<double>(scalar));
  if (is_gemma(family) && family.sandwich_norms) {
    for (const auto* key : {"attn_logit_softcapping", "final_logit_softcapping"}) {
      if (!reader.has(key) && family.has_score_softcap) {
        reader.fail(key, "a number above 0, or null for none");
      }
    }
    config.attention_softcap = reader.find_number("attn_logit_softcapping");
    if (config.attention_softcap && !family.has_score_softcap) {
      reader.fail("attn_logit_softcapping", "null: transformers does not apply it in this family");
    }
    config.logit_softcap = reader.find_number("final_logit_softcapping");
  }
  config.scale_embedding = is_gemma(family);
  config.tie_word_embeddings = reader.boolean("tie_word_embeddings", is_gemma(family));
  config.padding_idx = reader.find_integer("pad_token_id", -config.vocab_size, config.vocab_size - 1);
}

void read_gpt2(DecoderConfig& config, KeyReader& reader) {
  config.hidden_size = reader.integer("n_embd");
  config.intermediate_size = reader.find_integer("n_inner").value_or(4 * config.hidden_size);
  config.num_hidden_layers = reader.integer("n_layer", kMaxLayers);
  config.num_attention_heads = config.num_key_value_heads = reader.integer("n_head");
  config.max_position_embeddings = reader.integer("n_positions");
  if (config.hidden_size % config.num_attention_heads != 0) {
    reader.fail("n_head", fmt::format("a divisor of n_embd, {}", config.hidden_size));
  }
  config.head_dim = config.hidden_size / config.num_attention_heads;
  config.norm = NormKind::Layer;
  config.norm_eps = reader.number("layer_norm_epsilon");
  config.rotary.reset();
  config.query_bias = config.output_bias = config.mlp_bias = true;
  config.activation = reader.named("activation_function", kActivations, std::optional<Activation>());
  config.gated_mlp = false;
  if (reader.boolean("scale_attn_weights", true)) {
    config.attention_scale = 1 / std::sqrt(static_cast<double>(config.head_dim));
  }
  config.scale_by_layer = reader.boolean("scale_attn_by_inverse_layer_idx", false);
  config.tie_word_embeddings = reader.boolean("tie_word_embeddings", true);
}

/// Keeps what does not matter, for format_config.
std::string take_other_keys(KeyReader& reader, const std::vector<std::string>& ignored_keys) {
  json other = json::object();
  for (const std::string_view key : kHarmlessKeys) {
    if (reader.has(key)) {
      reader.find(key);
      other[std::string(key)] = reader.object().at(std::string(key));
    }
  }
  for (const auto& [key, off] : kSwitchedOff) {
    if (const json* value = reader.find(key); value && *value != off) {
      reader.fail(key, fmt::format("{}: this package has no such feature", off.dump()));
    }
  }
  if (reader.has("pad_token_id") && reader.object().at("pad_token_id").is_number_integer()) {
    other["pad_token_id"] = reader.object().at("pad_token_id");
  }
  reader.find("pad_token_id");
  for (const auto& key : ignored_keys) {
    reader.find(key);
  }
  return other.dump();
}

json format_rotary(const RotaryConfig& rotary) {
  json out = {{"rope_type", name_of(kRotaryTypes, rotary.type)}};
  if (rotary.type != RotaryConfig::Type::Default) {
    out["factor"] = rotary.factor;
  }
  if (rotary.original_max_position_embeddings > 0) {
    out["original_max_position_embeddings"] = rotary.original_max_position_embeddings;
  }
  if (rotary.type == RotaryConfig::Type::Llama3) {
    out["low_freq_factor"] = rotary.low_freq_factor;
    out["high_freq_factor"] = rotary.high_freq_factor;
  }
  if (rotary.type == RotaryConfig::Type::Yarn) {
    out.update({{"beta_fast", rotary.beta_fast}, {"beta_slow", rotary.beta_slow}, {"truncate", rotary.truncate}});
    if (rotary.attention_factor) {
      out["attention_factor"] = *rotary.attention_factor;
    }
    if (rotary.mscale > 0) {
      out["mscale"] = rotary.mscale;
    }
    if (rotary.mscale_all_dim > 0) {
      out["mscale_all_dim"] = rotary.mscale_all_dim;
    }
  }
  return out;
}

/// Writes the keys of transformers 4, which 5 reads too, unless only those of 5 can say it.
void put_rotaries(json& out, const DecoderConfig& config) {
  const bool is_plain = config.rotary->type == RotaryConfig::Type::Default;
  if (config.local_rotary && config.local_rotary->type != RotaryConfig::Type::Default) {
    const auto with_theta = [](const RotaryConfig& rotary) {
      json object = format_rotary(rotary);
      object["rope_theta"] = rotary.theta;
      return object;
    };
    out["rope_parameters"] = {{"full_attention", with_theta(*config.rotary)},
                              {"sliding_attention", with_theta(*config.local_rotary)}};
    return;
  }
  out["rope_theta"] = config.rotary->theta;
  out["rope_scaling"] = is_plain ? json() : format_rotary(*config.rotary);
  if (config.local_rotary) {
    out["rope_local_base_freq"] = config.local_rotary->theta;
  }
}

json nullable(const auto& value) {
  return value ? json(*value) : json();
}

void put_rotary_family(json& out, const DecoderConfig& config, const Family& family) {
  out.update({{"hidden_size", config.hidden_size},
              {"intermediate_size", config.intermediate_size},
              {"num_hidden_layers", config.num_hidden_layers},
              {"num_attention_heads", config.num_attention_heads},
              {"num_key_value_heads", config.num_key_value_heads},
              {"head_dim", config.head_dim},
              {"max_position_embeddings", config.max_position_embeddings},
              {"rms_norm_eps", config.norm_eps}});
  out[std::string(family.activation_key)] = name_of(kActivations, config.activation);
  if (family.query_bias == Bias::ByKey) {
    out["attention_bias"] = config.query_bias;
  }
  if (family.has_mlp_bias) {
    out["mlp_bias"] = config.mlp_bias;
  }
  if (family.window != Window::None) {
    out["sliding_window"] = nullable(config.sliding_window);
  }
  if (family.window == Window::ByLayer) {
    out["use_sliding_window"] = config.sliding_window.has_value();
  }
  if (family.window == Window::ByLayer || family.window == Window::Pattern) {
    auto& types = out["layer_types"] = json::array();
    for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
      types.push_back(name_of(kLayerTypes, config.is_sliding(layer)));
    }
  }
  put_rotaries(out, config);
  if (family.has_query_scalar) {
    out["query_pre_attn_scalar"] = std::llround(1 / (config.attention_scale * config.attention_scale));
  }
  if (family.sandwich_norms) {
    out["attn_logit_softcapping"] = nullable(config.attention_softcap);
    out["final_logit_softcapping"] = nullable(config.logit_softcap);
  }
  out["pad_token_id"] = nullable(config.padding_idx);
}

void put_gpt2(json& out, const DecoderConfig& config) {
  out.update({{"n_embd", config.hidden_size},
              {"n_inner", config.intermediate_size},
              {"n_layer", config.num_hidden_layers},
              {"n_head", config.num_attention_heads},
              {"n_positions", config.max_position_embeddings},
              {"layer_norm_epsilon", config.norm_eps},
              {"scale_attn_weights", config.attention_scale != 1},
              {"scale_attn_by_inverse_layer_idx", config.scale_by_layer}});
  // gelu_new is the tanh approximation's name in this family.
  out["activation_function"] =
      config.activation == Activation::TanhGelu ? "gelu_new" : name_of(kActivations, config.activation);
}

std::string supported_types() {
  std::vector<std::string_view> types{"gpt2"};
  std::ranges::transform(families(), std::back_inserter(types), &Family::model_type);
  return fmt::format("\"{}\"", fmt::join(types, "\", \""));
}

}  // namespace

void check_config(const DecoderConfig& config) {
  const auto check_size = [](const char* name, int64_t size, int64_t most = kMaxSize) {
    TESSERA_CHECK(ValueError, size >= 1 && size <= most, "DecoderConfig: {} is {}; it must be from 1 to {}", name, size,
                  most);
  };
  TESSERA_CHECK(ValueError, config.model_type == "gpt2" || find_family(config.model_type) != nullptr,
                "DecoderConfig: model_type is '{}'; it must be one of {}", config.model_type, supported_types());
  check_size("vocab_size", config.vocab_size);
  check_size("hidden_size", config.hidden_size);
  check_size("intermediate_size", config.intermediate_size);
  check_size("num_hidden_layers", config.num_hidden_layers, kMaxLayers);
  check_size("num_attention_heads", config.num_attention_heads);
  check_size("num_key_value_heads", config.num_key_value_heads);
  check_size("head_dim", config.head_dim);
  check_size("max_position_embeddings", config.max_position_embeddings);
  TESSERA_CHECK(ValueError, config.num_attention_heads % config.num_key_value_heads == 0,
                "DecoderConfig: num_key_value_heads is {}; it must divide num_attention_heads, {}",
                config.num_key_value_heads, config.num_attention_heads);
  const bool is_dynamic = config.rotary && config.rotary->type == RotaryConfig::Type::Dynamic;
  TESSERA_CHECK(ValueError, !config.rotary || (config.head_dim % 2 == 0 && (!is_dynamic || config.head_dim > 2)),
                "DecoderConfig: head_dim is {}; with rotary positions it must be even, and above 2 if these are "
                "dynamic",
                config.head_dim);
  TESSERA_CHECK(ValueError, !config.rotary || config.rotary->theta > 1,
                "DecoderConfig: rope_theta is {}; it must be above 1", config.rotary->theta);
  TESSERA_CHECK(ValueError, (config.model_type == "gpt2") == !config.rotary,
                "DecoderConfig: the family {} has {} positions", config.model_type,
                config.model_type == "gpt2" ? "learned" : "rotary");
  TESSERA_CHECK(ValueError, !config.sliding_window || *config.sliding_window >= 1,
                "DecoderConfig: sliding_window is {}; it must be at least 1", *config.sliding_window);
  TESSERA_CHECK(ValueError,
                config.slides.empty() || config.slides.size() == static_cast<size_t>(config.num_hidden_layers),
                "DecoderConfig: slides has {} entries; it must have one for each of {} layers, or none",
                config.slides.size(), config.num_hidden_layers);
}

DecoderConfig parse_config(std::string_view text, const std::string& file,
                           const std::vector<std::string>& ignored_keys) {
  dcp::check_json_depth(text, file, kMaxConfigDepth);
  json whole;
  try {
    whole = json::parse(text.begin(), text.end());
  } catch (const json::exception& error) {
    throw ValueError(fmt::format("{}: no JSON ({})", file, error.what()));
  }
  TESSERA_CHECK(ValueError, whole.is_object(), "{}: is {}; it must be an object", file, shown(whole));
  KeyReader reader(whole, file + ": ");
  const json* const type = reader.find("model_type");
  DecoderConfig config;
  config.model_type = type && type->is_string() ? type->get<std::string>() : "";
  const Family* const family = find_family(config.model_type);
  if (!family && config.model_type != "gpt2") {
    reader.fail("model_type", fmt::format("one of {}", supported_types()));
  }
  config.vocab_size = reader.integer("vocab_size");
  config.dtype =
      reader.named(reader.find("dtype") ? "dtype" : "torch_dtype", kDtypes, std::optional(c10::ScalarType::Float));
  reader.find("torch_dtype");
  if (family) {
    read_rotary_family(config, reader, *family);
  } else {
    read_gpt2(config, reader);
  }
  config.other_keys = take_other_keys(reader, ignored_keys);
  reader.check_all_read("If they do not matter, name them in ignored_config_keys");
  check_config(config);
  return config;
}

DecoderConfig read_config(const std::string& file, const std::vector<std::string>& ignored_keys) {
  return parse_config(dcp::read_text(file, kMaxConfigBytes), file, ignored_keys);
}

std::string format_config(const DecoderConfig& config) {
  check_config(config);
  const Family* const family = find_family(config.model_type);
  json out = json::parse(config.other_keys);
  out.update({{"model_type", config.model_type},
              {"architectures", json::array({family ? family->architecture : "GPT2LMHeadModel"})},
              {"vocab_size", config.vocab_size},
              {"tie_word_embeddings", config.tie_word_embeddings},
              {"torch_dtype", name_of(kDtypes, config.dtype)}});
  if (family) {
    put_rotary_family(out, config, *family);
  } else {
    put_gpt2(out, config);
  }
  std::string text = out.dump(2) + "\n";
  DecoderConfig again = parse_config(text, "format_config");
  again.other_keys = config.other_keys;  // architectures may be new
  TESSERA_CHECK(ValueError, again == config,
                "format_config: config.json of the family \"{}\" cannot express this config's options; it would mean "
                "other ones: {}",
                config.model_type, text);
  return text;
}

}  // namespace tessera::models
