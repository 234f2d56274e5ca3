#pragma once
// Maps parameters of a Decoder to the tensor names in each family's Hugging Face checkpoints. Internal to this package.
// Pure functions; thread-safe.
//
//   weight_source("gpt2", "layers.3.self_attn.k_proj.weight")
//     // {.key = "transformer.h.3.attn.c_attn.weight", .part = 1, .parts = 3, .is_transposed = true}
//   weight_source("mixtral", "layers.3.mlp.experts.up_proj")
//     // {.key = "model.layers.3.block_sparse_moe.experts.#.w3.weight", .by_expert = true}

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::models {

/// Stored tensor that contains a parameter, alone or as one of equal parts, or the tensors of a parameter's experts.
struct WeightSource {
  std::string key;  // by_expert: with # instead of the expert's number
  int part = 0;     // of `parts` along the parameter's dim 0
  int parts = 1;
  bool is_transposed = false;  // whether the stored matrix is transposed
  bool by_expert = false;      // one stored tensor per index of the parameter's dim 0

  std::string key_of(int64_t expert) const;
  bool operator==(const WeightSource&) const = default;
};

/// Returns the stored tensor of a parameter. Throws AssertionError if the family's table lacks the parameter.
WeightSource weight_source(const std::string& model_type, std::string_view parameter);

/// Returns the prefix of keys that is absent in checkpoints of the bare model, without its output layer: "model.".
std::string_view optional_prefix(const std::string& model_type);

/// Returns whether a stored tensor is a constant that the model recomputes, such as a causal mask.
bool is_constant(const std::string& model_type, std::string_view key);

}  // namespace tessera::models
