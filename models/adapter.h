#pragma once
// LoRA adapters of a decoder in folders of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors.
//
//   auto model = models::from_pretrained("Llama-3.2-1B", {.mesh = mesh, .lora = LoraConfig{
//       .target_modules = {"q_proj", "v_proj"}, .r = 8, .lora_alpha = 16}});
//   ...                                             // a training loop: only adapters have gradients
//   models::save_adapter(model, "adapter");         // peft.PeftModel.from_pretrained(base_model, "adapter")
//   merge_lora(model);
//   models::save_pretrained(model, "tuned");        // or one model, which knows of no adapter
//
//   auto same = models::from_pretrained("Llama-3.2-1B", {.mesh = mesh, .adapter = "adapter"});
//
// Errors are thrown on every rank or on none. Both functions are collectives of the default group's ranks. Thread
// safety: one thread per rank.

#include <string>

#include "lora/lora.h"
#include "models/decoder.h"

namespace tessera::models {

/// Writes the adapters to `folder`, which is new. Throws StateError if there are none, and NotImplementedError for
/// GPT-2's query, key and value, whose matrices are one in PEFT.
void save_adapter(Decoder& model, const std::string& folder);

/// Reads adapters that save_adapter or PEFT has written, into the model's, or adds them first if it has none and is not
/// sharded. Throws ValueError for a config that is not supported or is another than that of the model's adapters, and
/// CheckpointError for missing and unexpected tensors.
void load_adapter(Decoder& model, const std::string& folder);

/// Returns what add_lora needs to know for load_adapter.
LoraConfig read_adapter_config(const Decoder& model, const std::string& folder);

}  // namespace tessera::models
