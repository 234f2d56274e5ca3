#pragma once
// LoRA: trains low-rank terms beside frozen linear layers (E. Hu et al., 2021). Works on any module with
// tessera::nn::Linear layers.
//
//   add_lora(model, {.target_modules = {"q_proj", "v_proj"}, .r = 8, .lora_alpha = 16});   // before sharding
//   parallelize_module(model, mesh["tp"], plan);                                           // also shards the adapters
//   fully_shard(model, {.mesh = mesh["dp"]});
//   tessera::optim::FusedAdamW optimizer(model->parameters());                             // skips frozen parameters
//   ...
//   merge_lora(model);                                                                     // a plain model again
//
// A layer computes W x + b + lora_alpha / r * B(A(x)). It remains the same module and gains two children, named as in
// Hugging Face's PEFT: q_proj.lora_A.weight [r, in] and q_proj.lora_B.weight [out, r]. For a bfloat16 or float16 layer,
// the adapter and its term are in float32 unless fully_shard's mp_policy casts them.
//
// models/adapter.h reads and writes PEFT's files. Thread safety: like writing the parameters.

#include <torch/nn/module.h>

#include <string>
#include <string_view>
#include <vector>

#include "nn/hooks/module_ref.h"
#include "nn/lora_adapter.h"

namespace tessera {

struct LoraConfig {
  /// Patterns (parallel/path_pattern.h) for the end of a layer's path: "q_proj", "self_attn.[qkv]_proj",
  /// "layers.0.*.*".
  std::vector<std::string> target_modules;
  int64_t r = 8;
  double lora_alpha = 8;
  bool use_rslora = false;  // scale by lora_alpha / sqrt(r)
  double lora_dropout = 0;  // dropout probability of an adapter's input in training
};

/// Adds an adapter to each Linear that a pattern matches, and freezes all other parameters. A is initialized like a
/// Linear's weight, and B to zeros. Throws, before any change:
/// - ValueError for invalid numbers in the config, and for a layer that shares its weight.
/// - KeyError for a pattern without a match.
/// - StateError if the module has adapters, a layer is already sharded, or a Linear has no hook point.
void add_lora(ModuleRef module, const LoraConfig& config);

/// Adds each adapter's product to its layer's weight and removes the adapter. Collective if the module is sharded.
/// Other parameters stay frozen, and fully_shard units continue to gather the removed matrices. Throws StateError
/// without adapters, or inside forward or backward.
void merge_lora(ModuleRef module);

/// Linear layer with an adapter.
struct LoraLayer {
  std::string path;
  std::shared_ptr<torch::nn::Module> module;
  std::shared_ptr<const nn::LoraAdapter> adapter;
};

/// Returns the layers with adapters, each once.
std::vector<LoraLayer> lora_layers(ModuleRef module);

/// Returns whether `name` is the parameter name of an adapter's matrix.
bool is_lora_parameter(std::string_view name);

/// Initializes the adapters as add_lora does, for use after to_empty.
void reset_lora(ModuleRef module);

}  // namespace tessera
