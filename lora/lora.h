#pragma once
// LoRA: trains low-rank terms beside frozen linear layers (E. Hu et al., 2021). Works on any module with
// tessera::nn::Linear layers.
//
//   add_lora(model, {.target_modules = {"q_proj", "v_proj"}, .r = 8, .lora_alpha = 16});   // before it is sharded
//   parallelize_module(model, mesh["tp"], plan);                                           // takes the adapters along
//   fully_shard(model, {.mesh = mesh["dp"]});
//   tessera::optim::FusedAdamW optimizer(model->parameters());                             // skips what is frozen
//   ...
//   merge_lora(model);                                                                     // a plain model again
//
// A layer computes W x + b + lora_alpha / r * B(A(x)). It stays the module that it was, with two children more, whose
// names are those of Hugging Face's PEFT: q_proj.lora_A.weight [r, in], q_proj.lora_B.weight [out, r]. Adapters of a
// bfloat16 or float16 layer are in float32, and so is their term, unless fully_shard's mp_policy casts them.
//
// models/adapter.h reads and writes PEFT's files. Thread safety: like writes to the parameters.

#include <torch/nn/module.h>

#include <string>
#include <string_view>
#include <vector>

#include "nn/hooks/module_ref.h"
#include "nn/lora_adapter.h"

namespace tessera {

struct LoraConfig {
  /// Patterns (parallel/path_pattern.h) of the end of a layer's path: "q_proj", "self_attn.[qkv]_proj", "layers.0.*.*".
  std::vector<std::string> target_modules;
  int64_t r = 8;
  double lora_alpha = 8;
  bool use_rslora = false;  // lora_alpha / sqrt(r)
  double lora_dropout = 0;  // of an adapter's input, in training
};

/// Adds an adapter to each Linear that a pattern matches, and freezes all other parameters. A starts random, drawn like
/// a Linear's weight, and B with zeros. Throws, before it changes anything:
/// - ValueError for other numbers than those of a LoRA, and for a layer that shares its weight.
/// - KeyError for a pattern without a match.
/// - StateError if the module has adapters or a layer is sharded already, and for a Linear without a hook point.
void add_lora(ModuleRef module, const LoraConfig& config);

/// Adds each adapter's product to its layer's weight, and removes the adapter. Collective if the module is sharded.
/// Other parameters stay frozen. Units of fully_shard go on gathering the removed matrices. Throws StateError if there
/// are no adapters, or inside forward or backward.
void merge_lora(ModuleRef module);

/// A Linear with an adapter.
struct LoraLayer {
  std::string path;
  std::shared_ptr<torch::nn::Module> module;
  std::shared_ptr<const nn::LoraAdapter> adapter;
};

/// Returns the layers that have adapters, each once.
std::vector<LoraLayer> lora_layers(ModuleRef module);

/// Returns whether a parameter's name is that of an adapter's matrix.
bool is_lora_parameter(std::string_view name);

/// Gives adapters the values that add_lora starts with, after to_empty.
void reset_lora(ModuleRef module);

}  // namespace tessera
