#include "models/weight_names.h"

#include <fmt/format.h>

#include <optional>

#include "base/error.h"
#include "models/decoder_families.h"
#include "parallel/path_pattern.h"

namespace tessera::models {

namespace {

/// Module of ours, module of theirs; * is a layer's number. Weight and bias have the same name in both.
struct Rule {
  std::string_view ours;
  std::string_view theirs;
  int part = 0;
  int parts = 1;
  bool is_transposed = false;
};
using Table = std::vector<Rule>;

// Conv1D has [in, out] matrices, and query, key and value in one.
const Table& gpt2_table() {
  static const Table table = {
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
  return table;
}

/// Of all families with rotary positions; they differ in the names of norms.
Table rotary_table(bool has_sandwich_norms) {
  Table table = {
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
  if (has_sandwich_norms) {
    table.push_back({"layers.*.attention_out_norm", "model.layers.*.post_attention_layernorm"});
    table.push_back({"layers.*.mlp_norm", "model.layers.*.pre_feedforward_layernorm"});
    table.push_back({"layers.*.mlp_out_norm", "model.layers.*.post_feedforward_layernorm"});
  } else {
    table.push_back({"layers.*.mlp_norm", "model.layers.*.post_attention_layernorm"});
  }
  return table;
}

const Table& table_of(const std::string& model_type) {
  static const Table plain = rotary_table(false), sandwich = rotary_table(true);
  const Family* const family = find_family(model_type);
  TESSERA_ASSERT(family != nullptr, "no family {}", model_type);
  return family->learned_positions ? gpt2_table() : family->sandwich_norms ? sandwich : plain;
}

/// Puts the layer's number of `path`, which matches rule.ours, in place of the * of rule.theirs.
std::string with_number(const Rule& rule, std::string_view path) {
  const size_t star = rule.ours.find('*'), their_star = rule.theirs.find('*');
  if (star == std::string_view::npos) {
    return std::string(rule.theirs);
  }
  const auto number = path.substr(star, path.find('.', star) - star);
  return fmt::format("{}{}{}", rule.theirs.substr(0, their_star), number, rule.theirs.substr(their_star + 1));
}

}  // namespace

WeightSource weight_source(const std::string& model_type, std::string_view parameter) {
  const size_t dot = parameter.rfind('.');
  const auto module = parameter.substr(0, dot), name = parameter.substr(dot + 1);
  for (const auto& rule : table_of(model_type)) {
    if (matches_path(rule.ours, module)) {
      return {.key = fmt::format("{}.{}", with_number(rule, module), name),
              .part = rule.part,
              .parts = rule.parts,
              .is_transposed = rule.is_transposed && name == "weight"};
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
