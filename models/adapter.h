#pragma once
// LoRA adapters of a decoder in Hugging Face's PEFT format: adapter_config.json and adapter_model.safetensors.
//
//   auto model = models::from_pretrained("Llama-3.2-1B", {.mesh = mesh, .lora = LoraConfig{
//       .target_modules = {"q_proj", "v_proj"}, .r = 8, .lora_alpha = 16}});
//   ...                                             // a training loop: only adapters have gradients
//   models::save_adapter(model, "adapter");         // peft.PeftModel.from_pretrained(base_model, "adapter")
//   merge_lora(model);
//   models::save_pretrained(model, "tuned");        // or save the merged model, without adapters
//
//   auto same = models::from_pretrained("Llama-3.2-1B", {.mesh = mesh, .adapter = "adapter"});
//
// Errors are thrown on every rank or on none. Both functions are collective over the default group. Thread safety: one
// thread per rank.

#include <string>

#include "lora/lora.h"
#include "models/decoder.h"

namespace tessera::models {

/// Writes the adapters to a new `folder`. Throws StateError without adapters, and NotImplementedError for adapters of
/// GPT-2's query, key and value, whose matrices are one in PEFT.
void save_adapter(Decoder& model, const std::string& folder);

/// Reads adapters written by save_adapter or PEFT into the model's adapters. If the model has none and is not sharded,
/// adds them first. Throws ValueError for an unsupported config or one that differs from the model's adapters, and
/// CheckpointError for missing or unexpected tensors.
void load_adapter(Decoder& model, const std::string& folder);

/// Returns the configuration of add_lora for load_adapter.
LoraConfig read_adapter_config(const Decoder& model, const std::string& folder);

}  // namespace tessera::models
