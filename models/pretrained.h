#pragma once
// Hugging Face model folders in and out, without Python: config.json, safetensors files, and tokenizer files as they
// are. No rank ever holds more than its shards.
//
//   auto mesh = init_device_mesh(at::kCPU, {2, 4}, {"dp", "tp"});
//   auto model = models::from_pretrained("Llama-3.2-1B", {.mesh = mesh, .dtype = at::kFloat});
//   ...                                                             // a training loop, as for any sharded module
//   models::save_pretrained(model, "tuned");                        // AutoModelForCausalLM.from_pretrained("tuned")
//
// docs/models.md lists the families and what is refused. Errors are thrown on every rank or on none: ValueError for a
// config or options (decoder_config.h, decoder_layout.h), CheckpointError for files. Both functions are collectives of
// the default group's ranks. Thread safety: one thread per rank.

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <vector>

#include "device_mesh/device_mesh.h"
#include "lora/lora.h"
#include "models/decoder.h"
#include "models/decoder_layout.h"

namespace tessera::models {

struct FromPretrainedOptions {
  std::optional<DeviceMesh> mesh = std::nullopt;  // axes "dp", "replicate", "tp"; none: each rank has the whole model
  DecoderLayout layout = {};                      // needs a mesh
  std::optional<at::ScalarType> dtype = std::nullopt;  // of the parameters; default: the config's
  at::Device device = at::kCPU;                        // without a mesh, which has its own
  std::string variant = {};                            // of the files: "fp16" for model.fp16.safetensors
  std::vector<std::string> ignored_config_keys = {};   // see parse_config
  std::optional<LoraConfig> lora = std::nullopt;       // adds new adapters, and freezes what is read
  std::string adapter = {};                            // folder of adapters to add and read (adapter.h)
};

/// Builds the folder's model without memory, lays it out, and reads this rank's shards of the weights. Throws
/// CheckpointError that lists all missing and unexpected tensors and those of other sizes, before it reads any. A tied
/// model's folder may have the output layer too, if it equals the embedding.
Decoder from_pretrained(const std::string& folder, const FromPretrainedOptions& options = {});

struct SavePretrainedOptions {
  int64_t max_file_bytes = int64_t{5} << 30;  // see dcp::SaveOptions
};

/// Writes a new folder that transformers opens: weights in the parameters' dtype with their index, config.json, and
/// tokenizer and generation files of the folder that the model came from. config.json comes last. Throws StateError for
/// a model with adapters.
void save_pretrained(Decoder& model, const std::string& folder, const SavePretrainedOptions& options = {});

}  // namespace tessera::models
