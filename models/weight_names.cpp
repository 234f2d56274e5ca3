#include "models/weight_names.h"

#include <fmt/format.h>

#include <optional>

#include "base/error.h"
#include "models/decoder_families.h"
#include "parallel/path_pattern.h"

namespace tessera::models {

namespace {

/// Module name here, and in the checkpoint; * is a layer's number. Weight and bias have the same name in both. For
/// experts, it is a parameter here and tensors there, where # is the expert's number.
struct Rule {
  std::string_view ours;
  std::string_view theirs;
  int part = 0;
  int parts = 1;
  bool is_transposed = false;
};
using Table = std::vector<Rule>;

// Conv1D has [in, out] matrices, and query, key and value in one matrix.
const Table kGpt2 = {
    {"embed_tokens", "transformer.wte"},
    {"embed_positions", "transformer.wpe"},
    {"layers.*.attention_norm", "transformer.h.*.ln_1"},
    {"layers.*.self_attn.q_proj", "transformer.h.*.attn.c_attn", 0, 3, true},
    {"layers.*.self_attn.k_proj", "transformer.h.*.attn.c_attn", 1, 3, true},
    {"layers.*.self_attn.v_proj", "transformer.h.*.attn.c_attn", 2, 3, true},
    {"layers.*.self_attn.o_proj", "transformer.h.*.attn.c_proj", 0, 1, true},
    {"layers.*.mlp_norm", "transformer.h.*.ln_2"},
    {"layers.*.mlp.up_proj", "transformer.h.*.mlp.c_fc", 0, 1, true},
    {"layers.*.mlp.down_proj", "transformer.h.*.mlp.c_proj", 0, 1, true},
    {"norm", "transformer.ln_f"},
    {"lm_head", "lm_head"},
};

// For all families with rotary positions.
const Table kRotary = {
    {"embed_tokens", "model.embed_tokens"},
    {"layers.*.attention_norm", "model.layers.*.input_layernorm"},
    {"layers.*.self_attn.q_proj", "model.layers.*.self_attn.q_proj"},
    {"layers.*.self_attn.k_proj", "model.layers.*.self_attn.k_proj"},
    {"layers.*.self_attn.v_proj", "model.layers.*.self_attn.v_proj"},
    {"layers.*.self_attn.o_proj", "model.layers.*.self_attn.o_proj"},
    {"layers.*.self_attn.q_norm", "model.layers.*.self_attn.q_norm"},
    {"layers.*.self_attn.k_norm", "model.layers.*.self_attn.k_norm"},
    {"layers.*.mlp.gate_proj", "model.layers.*.mlp.gate_proj"},
    {"layers.*.mlp.up_proj", "model.layers.*.mlp.up_proj"},
    {"layers.*.mlp.down_proj", "model.layers.*.mlp.down_proj"},
    {"norm", "model.norm"},
    {"lm_head", "lm_head"},
};

// Families differ in the names of norms and of experts.
const Table kTwoNorms = {{"layers.*.mlp_norm", "model.layers.*.post_attention_layernorm"}};
const Table kSandwichNorms = {
    {"layers.*.attention_out_norm", "model.layers.*.post_attention_layernorm"},
    {"layers.*.mlp_norm", "model.layers.*.pre_feedforward_layernorm"},
    {"layers.*.mlp_out_norm", "model.layers.*.post_feedforward_layernorm"},
};
const Table kMixtralExperts = {
    {"layers.*.mlp.router", "model.layers.*.block_sparse_moe.gate"},
    {"layers.*.mlp.experts.gate_proj", "model.layers.*.block_sparse_moe.experts.#.w1.weight"},
    {"layers.*.mlp.experts.up_proj", "model.layers.*.block_sparse_moe.experts.#.w3.weight"},
    {"layers.*.mlp.experts.down_proj", "model.layers.*.block_sparse_moe.experts.#.w2.weight"},
};
const Table kExperts = {
    {"layers.*.mlp.router", "model.layers.*.mlp.gate"},
    {"layers.*.mlp.experts.gate_proj", "model.layers.*.mlp.experts.#.gate_proj.weight"},
    {"layers.*.mlp.experts.up_proj", "model.layers.*.mlp.experts.#.up_proj.weight"},
    {"layers.*.mlp.experts.down_proj", "model.layers.*.mlp.experts.#.down_proj.weight"},
};

/// Returns the tables of a family. Each parameter is in exactly one.
std::vector<const Table*> tables_of(const std::string& model_type) {
  const Family* const family = find_family(model_type);
  TESSERA_ASSERT(family != nullptr, "no family {}", model_type);
  if (family->learned_positions) {
    return {&kGpt2};
  }
  return {&kRotary, family->sandwich_norms ? &kSandwichNorms : &kTwoNorms,
          family->mixture == Mixture::Always ? &kMixtralExperts : &kExperts};
}

/// Replaces the * of rule.theirs by the layer's number in `path`, which matches rule.ours.
std::string with_number(const Rule& rule, std::string_view path) {
  const size_t star = rule.ours.find('*'), their_star = rule.theirs.find('*');
  if (star == std::string_view::npos) {
    return std::string(rule.theirs);
  }
  const auto number = path.substr(star, path.find('.', star) - star);
  return fmt::format("{}{}{}", rule.theirs.substr(0, their_star), number, rule.theirs.substr(their_star + 1));
}

}  // namespace

std::string WeightSource::key_of(int64_t expert) const {
  const size_t at = key.find('#');
  return fmt::format("{}{}{}", key.substr(0, at), expert, key.substr(at + 1));
}

WeightSource weight_source(const std::string& model_type, std::string_view parameter) {
  const size_t dot = parameter.rfind('.');
  const auto module = parameter.substr(0, dot), name = parameter.substr(dot + 1);
  for (const Table* table : tables_of(model_type)) {
    for (const auto& rule : *table) {
      if (matches_path(rule.ours, module)) {
        return {.key = fmt::format("{}.{}", with_number(rule, module), name),
                .part = rule.part,
                .parts = rule.parts,
                .is_transposed = rule.is_transposed && name == "weight"};
      }
      if (matches_path(rule.ours, parameter)) {
        return {.key = with_number(rule, parameter), .by_expert = true};
      }
    }
  }
  detail::assertion_failed("weight_source", __FILE__, __LINE__,
                           fmt::format("no name for {} in the family {}", parameter, model_type));
}

std::string_view optional_prefix(const std::string& model_type) {
  return model_type == "gpt2" ? "transformer." : "model.";
}

bool is_constant(const std::string& model_type, std::string_view key) {
  return model_type == "gpt2" ? key.ends_with(".attn.bias") || key.ends_with(".attn.masked_bias")
                              : key.ends_with(".rotary_emb.inv_freq");
}

}  // namespace tessera::models
