#include "models/decoder_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "models/config_reader.h"
#include "models/decoder_families.h"
#include "models/expert_keys.h"
#include "models/rotary_keys.h"

namespace tessera::models {

namespace {

constexpr int64_t kMaxLayers = 100'000;

const Names<c10::ScalarType> kDtypes = {{"float32", c10::ScalarType::Float},
                                        {"bfloat16", c10::ScalarType::BFloat16},
                                        {"float16", c10::ScalarType::Half},
                                        {"float64", c10::ScalarType::Double}};
const Names<Activation> kActivations = {{"silu", Activation::Silu},         {"swish", Activation::Silu},
                                        {"gelu", Activation::Gelu},         {"gelu_pytorch_tanh", Activation::TanhGelu},
                                        {"gelu_new", Activation::TanhGelu}, {"relu", Activation::Relu}};
// Gemma's first checkpoints say gelu but mean its approximation, as transformers interprets it.
const Names<Activation> kGemmaActivations = {{"gelu_pytorch_tanh", Activation::TanhGelu},
                                             {"gelu", Activation::TanhGelu}};
const Names<bool> kLayerTypes = {{"full_attention", false}, {"sliding_attention", true}};

// Keys that do not affect this package's computations. Dropout is not applied.
constexpr std::array kHarmlessKeys = std::to_array<std::string_view>(
    {"_name_or_path", "architectures", "attention_dropout", "attn_implementation", "attn_pdrop", "bos_token_id",
     "cache_implementation", "chunk_size_feed_forward", "embd_pdrop", "eos_token_id", "gradient_checkpointing",
     "hidden_dropout", "id2label", "initializer_range", "label2id", "n_ctx", "num_labels", "output_attentions",
     "output_hidden_states", "pretraining_tp", "problem_type", "resid_pdrop", "return_dict", "summary_activation",
     "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params",
     "torchscript", "transformers_version", "use_bfloat16", "use_cache",
     // Keys for generation.
     "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
     "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
     "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size", "num_beam_groups",
     "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty",
     "return_dict_in_generate", "suppress_tokens", "temperature", "tokenizer_class", "top_k", "top_p", "typical_p"});

// Keys for features of other models, with the value that turns them off.
const std::vector<std::pair<std::string_view, Json>> kSwitchedOff = {{"is_encoder_decoder", false},
                                                                     {"add_cross_attention", false},
                                                                     {"tie_encoder_decoder", false},
                                                                     {"use_bidirectional_attention", false},
                                                                     {"use_mrope", false},
                                                                     {"reorder_and_upcast_attn", false},
                                                                     {"pruned_heads", Json::object()},
                                                                     {"is_decoder", false},
                                                                     {"router_jitter_noise", 0},
                                                                     {"qk_layernorm", false},
                                                                     {"use_parallel_residual", false}};

/// Returns whether each layer has a sliding window.
std::vector<bool> read_layer_types(KeyReader& reader, int64_t layers) {
  std::vector<bool> slides;
  const Json* const types = reader.find("layer_types");
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
  if (family.window == Window::Switch) {
    const int64_t first = reader.find_integer("max_window_layers", 0).value_or(0);
    if (!reader.boolean("use_sliding_window", false)) {
      config.sliding_window.reset();
    } else if (first > 0) {
      reader.fail("max_window_layers",
                  "0 or left out beside use_sliding_window: versions of transformers differ in it");
    }
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
      reader.find("_sliding_window_pattern");  // redundant if layer_types is present
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

int64_t read_head_dim(const DecoderConfig& config, KeyReader& reader, const Family& family) {
  if (const auto given = family.has_head_dim ? reader.find_integer("head_dim") : std::nullopt) {
    return *given;
  }
  if (family.needs_head_dim || config.hidden_size % config.num_attention_heads != 0) {
    if (!family.has_head_dim) {
      reader.fail("num_attention_heads", fmt::format("a divisor of hidden_size, {}", config.hidden_size));
    }
    reader.fail("head_dim",
                fmt::format("given: {}", family.needs_head_dim ? "the family has no default"
                                                               : "num_attention_heads does not divide hidden_size"));
  }
  return config.hidden_size / config.num_attention_heads;
}

void read_activation(DecoderConfig& config, KeyReader& reader, const Family& family) {
  if (!family.is_gemma()) {
    config.activation = reader.named(family.activation_key, kActivations, std::optional<Activation>());
    return;
  }
  const auto& names = family.model_type == "gemma" ? kGemmaActivations : kActivations;
  // Gemma's configs have both keys; the family determines which one counts.
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
  config.head_dim = read_head_dim(config, reader, family);
  config.norm = family.norm;
  config.norm_eps = reader.number(family.norm_eps_key);
  config.sandwich_norms = family.sandwich_norms;
  config.qk_norm = family.qk_norm;
  const auto bias = [&](Bias bias) {
    return bias == Bias::All || (bias == Bias::ByKey && reader.boolean(family.query_bias_key, false));
  };
  config.query_bias = bias(family.query_bias);
  config.output_bias = bias(family.output_bias);
  config.mlp_bias = family.has_mlp_bias && reader.boolean("mlp_bias", false);
  read_activation(config, reader, family);
  read_experts(config, reader, family);
  read_windows(config, reader, family);
  read_rotaries(config, reader, family);
  const int64_t scalar = family.has_query_scalar ? reader.integer("query_pre_attn_scalar") : config.head_dim;
  config.attention_scale = 1 / std::sqrt(static_cast<double>(scalar));
  if (family.sandwich_norms) {
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
  config.scale_embedding = family.is_gemma();
  config.tie_word_embeddings = reader.boolean("tie_word_embeddings", family.is_gemma());
  config.padding_idx = reader.find_integer("pad_token_id", -config.vocab_size, config.vocab_size - 1);
}

void read_gpt2(DecoderConfig& config, KeyReader& reader, const Family& family) {
  config.hidden_size = reader.integer("n_embd");
  config.intermediate_size = reader.find_integer("n_inner").value_or(4 * config.hidden_size);
  config.num_hidden_layers = reader.integer("n_layer", kMaxLayers);
  config.num_attention_heads = config.num_key_value_heads = reader.integer("n_head");
  config.max_position_embeddings = reader.integer("n_positions");
  if (config.hidden_size % config.num_attention_heads != 0) {
    reader.fail("n_head", fmt::format("a divisor of n_embd, {}", config.hidden_size));
  }
  config.head_dim = config.hidden_size / config.num_attention_heads;
  config.norm = family.norm;
  config.norm_eps = reader.number("layer_norm_epsilon");
  config.rotary.reset();
  config.query_bias = config.output_bias = config.mlp_bias = true;
  config.activation = reader.named(family.activation_key, kActivations, std::optional<Activation>());
  config.gated_mlp = false;
  if (reader.boolean("scale_attn_weights", true)) {
    config.attention_scale = 1 / std::sqrt(static_cast<double>(config.head_dim));
  }
  config.scale_by_layer = reader.boolean("scale_attn_by_inverse_layer_idx", false);
  config.tie_word_embeddings = reader.boolean("tie_word_embeddings", true);
}

/// Collects keys without effect, for format_config.
std::string take_other_keys(KeyReader& reader, const std::vector<std::string>& ignored_keys) {
  Json other = Json::object();
  for (const std::string_view key : kHarmlessKeys) {
    if (reader.has(key)) {
      reader.find(key);
      other[std::string(key)] = reader.object().at(std::string(key));
    }
  }
  for (const auto& [key, off] : kSwitchedOff) {
    if (const Json* value = reader.find(key); value && *value != off) {
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

void put_rotary_family(Json& out, const DecoderConfig& config, const Family& family) {
  out.update({{"hidden_size", config.hidden_size},
              {"intermediate_size", config.intermediate_size},
              {"num_hidden_layers", config.num_hidden_layers},
              {"num_attention_heads", config.num_attention_heads},
              {"num_key_value_heads", config.num_key_value_heads},
              {"max_position_embeddings", config.max_position_embeddings}});
  out[std::string(family.norm_eps_key)] = config.norm_eps;
  if (family.has_head_dim) {
    out["head_dim"] = config.head_dim;
  }
  out[std::string(family.activation_key)] = name_of(kActivations, config.activation);
  if (family.query_bias == Bias::ByKey) {
    out[std::string(family.query_bias_key)] = config.query_bias;
  }
  if (family.has_mlp_bias) {
    out["mlp_bias"] = config.mlp_bias;
  }
  if (family.window != Window::None) {
    out["sliding_window"] = nullable(config.sliding_window);
  }
  if (family.window == Window::ByLayer || family.window == Window::Switch) {
    out["use_sliding_window"] = config.sliding_window.has_value();
  }
  if (family.window == Window::ByLayer || family.window == Window::Pattern) {
    auto& types = out["layer_types"] = Json::array();
    for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
      types.push_back(name_of(kLayerTypes, config.is_sliding(layer)));
    }
  }
  put_experts(out, config, family);
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

void put_gpt2(Json& out, const DecoderConfig& config, const Family& family) {
  out.update({{"n_embd", config.hidden_size},
              {"n_inner", config.intermediate_size},
              {"n_layer", config.num_hidden_layers},
              {"n_head", config.num_attention_heads},
              {"n_positions", config.max_position_embeddings},
              {"layer_norm_epsilon", config.norm_eps},
              {"scale_attn_weights", config.attention_scale != 1},
              {"scale_attn_by_inverse_layer_idx", config.scale_by_layer}});
  // gelu_new is this family's name for the tanh approximation.
  out[std::string(family.activation_key)] =
      config.activation == Activation::TanhGelu ? "gelu_new" : name_of(kActivations, config.activation);
}

}  // namespace

void check_config(const DecoderConfig& config) {
  const Family* const family = find_family(config.model_type);
  TESSERA_CHECK(ValueError, family != nullptr, "DecoderConfig: model_type is '{}'; it must be one of {}",
                config.model_type, supported_types());
  const bool has_name = std::ranges::any_of(kDtypes, [&](const auto& named) { return named.second == config.dtype; });
  TESSERA_CHECK(ValueError, has_name, "DecoderConfig: dtype is {}; it must be Float, BFloat16, Half or Double",
                c10::toString(config.dtype));
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
  const int64_t rotated = config.rotary ? config.rotary->rotated_of(config.head_dim) : 0;
  TESSERA_CHECK(ValueError, !config.rotary || (rotated % 2 == 0 && rotated > (is_dynamic ? 2 : 0)),
                "DecoderConfig: head_dim is {}, of which {} features have rotary positions; these must be even, and "
                "above 2 if positions are dynamic",
                config.head_dim, rotated);
  TESSERA_CHECK(ValueError, !config.rotary || config.rotary->theta > 1,
                "DecoderConfig: rope_theta is {}; it must be above 1", config.rotary->theta);
  TESSERA_CHECK(ValueError, family->learned_positions == !config.rotary,
                "DecoderConfig: the family {} has {} positions", config.model_type,
                family->learned_positions ? "learned" : "rotary");
  TESSERA_CHECK(ValueError, !config.sliding_window || *config.sliding_window >= 1,
                "DecoderConfig: sliding_window is {}; it must be at least 1", *config.sliding_window);
  TESSERA_CHECK(ValueError,
                config.slides.empty() || config.slides.size() == static_cast<size_t>(config.num_hidden_layers),
                "DecoderConfig: slides has {} entries; it must have one for each of {} layers, or none",
                config.slides.size(), config.num_hidden_layers);
  TESSERA_CHECK(ValueError, (family->mixture != Mixture::None) == config.moe.has_value(),
                "DecoderConfig: the family {} has {}experts", config.model_type,
                family->mixture == Mixture::None ? "no " : "");
  if (config.moe) {
    check_experts(*config.moe, config.num_hidden_layers);
  }
}

DecoderConfig parse_config(std::string_view text, const std::string& file,
                           const std::vector<std::string>& ignored_keys) {
  const auto whole = parse_config_object(text, file);
  KeyReader reader(whole, file + ": ");
  const Json* const type = reader.find("model_type");
  DecoderConfig config;
  config.model_type = type && type->is_string() ? type->get<std::string>() : "";
  const Family* const family = find_family(config.model_type);
  if (!family) {
    reader.fail("model_type", fmt::format("one of {}", supported_types()));
  }
  config.vocab_size = reader.integer("vocab_size");
  config.dtype =
      reader.named(reader.find("dtype") ? "dtype" : "torch_dtype", kDtypes, std::optional(c10::ScalarType::Float));
  reader.find("torch_dtype");
  const auto read_keys = family->learned_positions ? read_gpt2 : read_rotary_family;
  read_keys(config, reader, *family);
  config.other_keys = take_other_keys(reader, ignored_keys);
  reader.check_all_read("If they do not matter, name them in ignored_config_keys");
  check_config(config);
  return config;
}

DecoderConfig read_config(const std::string& file, const std::vector<std::string>& ignored_keys) {
  return parse_config(read_config_text(file), file, ignored_keys);
}

std::string format_config(const DecoderConfig& config) {
  check_config(config);
  const Family& family = *find_family(config.model_type);
  Json out = Json::parse(config.other_keys);
  out.update({{"model_type", config.model_type},
              {"architectures", Json::array({family.architecture})},
              {"vocab_size", config.vocab_size},
              {"tie_word_embeddings", config.tie_word_embeddings},
              {"torch_dtype", name_of(kDtypes, config.dtype)}});
  const auto put_keys = family.learned_positions ? put_gpt2 : put_rotary_family;
  put_keys(out, config, family);
  std::string text = out.dump(2) + "\n";
  DecoderConfig again = parse_config(text, "format_config");
  again.other_keys = config.other_keys;  // architectures may have been added
  TESSERA_CHECK(ValueError, again == config,
                "format_config: config.json of the family \"{}\" cannot express this config's options; it would mean "
                "other ones: {}",
                config.model_type, text);
  return text;
}

}  // namespace tessera::models
