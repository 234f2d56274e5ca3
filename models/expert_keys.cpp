#include "models/expert_keys.h"

#include <algorithm>

namespace tessera::models {

namespace {

constexpr int64_t kMaxExperts = 10'000;

/// Reads the number of experts, which transformers 5 calls num_local_experts in all families.
int64_t read_num_experts(KeyReader& reader, const Family& family) {
  const auto local = reader.find_integer("num_local_experts", 1, kMaxExperts);
  const auto experts = reader.find_integer("num_experts", 1, kMaxExperts);
  if (local && experts && *local != *experts) {
    reader.fail("num_experts", fmt::format("the same as num_local_experts, {}, or left out", *local));
  }
  if (!local && !experts) {
    reader.fail(family.mixture == Mixture::Always ? "num_local_experts" : "num_experts",
                fmt::format("an integer from 1 to {}", kMaxExperts));
  }
  return local ? *local : *experts;
}

/// Returns whether each layer has experts, or nothing if all have.
std::vector<bool> read_sparse_layers(KeyReader& reader, int64_t layers) {
  const int64_t step = reader.find_integer("decoder_sparse_step").value_or(1);
  std::vector<bool> sparse;
  for (int64_t layer = 0; layer < layers; ++layer) {
    sparse.push_back((layer + 1) % step == 0);
  }
  if (const Json* dense = reader.find("mlp_only_layers")) {
    const auto is_layer = [](const Json& layer) { return layer.is_number_integer() && layer.get<double>() >= 0; };
    if (!dense->is_array() || !std::ranges::all_of(*dense, is_layer)) {
      reader.fail("mlp_only_layers", "a list of layers, from 0");
    }
    for (const auto& layer : *dense) {
      if (layer.get<double>() < static_cast<double>(layers)) {
        sparse[layer.get<size_t>()] = false;
      }
    }
  }
  return std::ranges::find(sparse, false) == sparse.end() ? std::vector<bool>() : sparse;
}

}  // namespace

void read_experts(DecoderConfig& config, KeyReader& reader, const Family& family) {
  if (family.mixture == Mixture::None) {
    return;
  }
  auto& moe = config.moe.emplace();
  moe.num_experts = read_num_experts(reader, family);
  moe.num_experts_per_tok = reader.integer("num_experts_per_tok");
  if (moe.num_experts_per_tok > moe.num_experts) {
    reader.fail("num_experts_per_tok", fmt::format("at most the number of experts, {}", moe.num_experts));
  }
  moe.output_router_logits = reader.boolean("output_router_logits", false);
  if (const Json* factor = reader.find("router_aux_loss_coef")) {
    if (!factor->is_number() || !(factor->get<double>() >= 0)) {
      reader.fail("router_aux_loss_coef", "a number from 0");
    }
    moe.router_aux_loss_coef = factor->get<double>();
  }
  moe.intermediate_size = config.intermediate_size;
  if (family.mixture == Mixture::ByLayer) {
    moe.intermediate_size = reader.integer("moe_intermediate_size");
    moe.norm_topk_prob = reader.boolean("norm_topk_prob", false);
    moe.sparse = read_sparse_layers(reader, config.num_hidden_layers);
  }
}

void put_experts(Json& out, const DecoderConfig& config, const Family& family) {
  if (!config.moe) {
    return;
  }
  const auto& moe = *config.moe;
  out.update({{"num_experts_per_tok", moe.num_experts_per_tok},
              {"output_router_logits", moe.output_router_logits},
              {"router_aux_loss_coef", moe.router_aux_loss_coef}});
  if (family.mixture == Mixture::Always) {
    out["num_local_experts"] = moe.num_experts;
    return;
  }
  out.update({{"num_experts", moe.num_experts},
              {"moe_intermediate_size", moe.intermediate_size},
              {"norm_topk_prob", moe.norm_topk_prob},
              {"decoder_sparse_step", 1}});
  auto& dense = out["mlp_only_layers"] = Json::array();
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    if (!config.is_sparse(layer)) {
      dense.push_back(layer);
    }
  }
}

void check_experts(const MoeConfig& moe, int64_t layers) {
  check_size("num_experts", moe.num_experts, kMaxExperts);
  check_size("num_experts_per_tok", moe.num_experts_per_tok, moe.num_experts);
  check_size("moe.intermediate_size", moe.intermediate_size);
  TESSERA_CHECK(ValueError, moe.sparse.empty() || moe.sparse.size() == static_cast<size_t>(layers),
                "DecoderConfig: moe.sparse has {} entries; it must have one for each of {} layers, or none",
                moe.sparse.size(), layers);
}

}  // namespace tessera::models
