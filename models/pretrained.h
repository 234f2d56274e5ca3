#pragma once
// Loads and saves Hugging Face model folders without Python: config.json, safetensors files, and unchanged tokenizer
// files. No rank ever holds more than its shards.
//
//   auto mesh = init_device_mesh(at::kCPU, {2, 4}, {"dp", "tp"});
//   auto model = models::from_pretrained("Llama-3.2-1B", {.mesh = mesh, .dtype = at::kFloat});
//   ...                                                             // a training loop, like for any sharded module
//   models::save_pretrained(model, "tuned");                        // AutoModelForCausalLM.from_pretrained("tuned")
//
// docs/models.md lists the families and limitations. Errors are thrown on every rank or on none: ValueError for a
// config or options (decoder_config.h, decoder_layout.h), CheckpointError for files. Both functions are collective over
// the default group. Thread safety: one thread per rank.

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
  at::Device device = at::kCPU;                        // only without a mesh
  std::string variant = {};                            // of the files: "fp16" for model.fp16.safetensors
  std::vector<std::string> ignored_config_keys = {};   // see parse_config
  std::optional<LoraConfig> lora = std::nullopt;       // adds new adapters and freezes the loaded weights
  std::string adapter = {};                            // folder of adapters to add and load (adapter.h)
};

/// Builds the folder's model without memory, distributes it, and reads this rank's shards of the weights. Before
/// reading any, throws CheckpointError that lists all tensors that are missing, unexpected or of other sizes. A tied
/// model's folder may also have the output layer if it equals the embedding.
Decoder from_pretrained(const std::string& folder, const FromPretrainedOptions& options = {});

struct SavePretrainedOptions {
  int64_t max_file_bytes = int64_t{5} << 30;  // see dcp::SaveOptions
};

/// Writes a new folder for transformers. It has the weights in the parameters' dtype with their index, config.json, and
/// the tokenizer and generation files of the model's source folder. config.json is written last. Throws StateError for
/// a model with adapters.
void save_pretrained(Decoder& model, const std::string& folder, const SavePretrainedOptions& options = {});

}  // namespace tessera::models
