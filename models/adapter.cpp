#include "models/adapter.h"

#include <fmt/ranges.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/io/checkpoint_index.h"
#include "checkpoint/io/file_io.h"
#include "checkpoint/ranks/rank_sync.h"
#include "models/config_reader.h"
#include "models/weight_names.h"

namespace tessera::models {

namespace {

constexpr int64_t kMaxRank = 65'536;
constexpr std::string_view kAdapterPrefix = "base_model.model.";

// Keys of adapter_config.json without effect here; the file's tensors determine which layers have adapters.
constexpr std::array kHarmlessAdapterKeys = {"task_type",
                                             "auto_mapping",
                                             "peft_version",
                                             "base_model_name_or_path",
                                             "revision",
                                             "inference_mode",
                                             "target_modules",
                                             "exclude_modules",
                                             "layers_to_transform",
                                             "layers_pattern",
                                             "fan_in_fan_out",
                                             "megatron_core",
                                             "qalora_group_size",
                                             "eva_config"};

// Initial values that leave the model's own weights unchanged.
constexpr std::array kPlainInits = {"gaussian", "orthogonal", "eva"};

std::string config_file(const std::string& folder) {
  return folder + "/adapter_config.json";
}

std::string tensor_file(const std::string& folder) {
  return folder + "/adapter_model.safetensors";
}

/// Returns PEFT's name of a layer, such as "model.layers.0.self_attn.q_proj"; none for a part of a fused matrix.
std::optional<std::string> stored_path(const Decoder& model, const std::string& path) {
  const auto source = weight_source(model->config.model_type, path + ".weight");
  if (source.parts > 1) {
    return std::nullopt;
  }
  return source.key.substr(0, source.key.rfind('.'));
}

std::string last_name(const std::string& path) {
  return path.substr(path.rfind('.') + 1);  // the whole path if it has no dot
}

bool is_plain_init(const Json& value) {
  return value.is_boolean() || std::ranges::any_of(kPlainInits, [&](const char* name) { return value == Json(name); });
}

/// Returns whether a value is what PEFT writes for an unused feature.
bool is_off(const Json& value) {
  return value == Json(false) || (value.is_structured() && value.empty());
}

/// Reads the config except target_modules.
LoraConfig read_numbers(const std::string& folder) {
  const auto file = config_file(folder);
  const auto whole = parse_config_object(read_config_text(file), file);
  KeyReader reader(whole, file + ": ");
  if (const auto* type = reader.find("peft_type"); !type || *type != Json("LORA")) {
    reader.fail("peft_type", "\"LORA\"");
  }
  if (const auto* bias = reader.find("bias"); bias && *bias != Json("none")) {
    reader.fail("bias", "\"none\"");
  }
  if (const auto* init = reader.find("init_lora_weights"); init && !is_plain_init(*init)) {
    reader.fail("init_lora_weights", "true, false, \"gaussian\", \"orthogonal\" or \"eva\"");
  }
  LoraConfig config{.target_modules = {},
                    .r = reader.integer("r", kMaxRank),
                    .lora_alpha = reader.number("lora_alpha"),
                    .use_rslora = reader.boolean("use_rslora", false)};
  if (const auto* dropout = reader.find("lora_dropout")) {
    if (!dropout->is_number() || !(dropout->get<double>() >= 0 && dropout->get<double>() < 1)) {
      reader.fail("lora_dropout", "a number in [0, 1)");
    }
    config.lora_dropout = dropout->get<double>();
  }
  for (const auto& [key, value] : whole.items()) {
    if (is_off(value) || std::ranges::find(kHarmlessAdapterKeys, key) != kHarmlessAdapterKeys.end()) {
      reader.find(key);
    }
  }
  reader.check_all_read("Adapters of plain LoRA can be read");
  return config;
}

/// Returns paths of the decoder's layers with tensors in the file. Throws CheckpointError for other tensors.
std::vector<std::string> read_targets(const Decoder& model, const std::string& folder) {
  auto index = dcp::open_checkpoint(tensor_file(folder));
  auto& stored = index.tensors[dcp::Section::Model];
  std::vector<std::string> targets;
  for (const auto& item : model->named_modules("", /*include_self=*/false)) {
    if (!dynamic_cast<const torch::nn::LinearImpl*>(item.value().get())) {
      continue;
    }
    if (const auto path = stored_path(model, item.key())) {
      const auto prefix = fmt::format("{}{}.", kAdapterPrefix, *path);
      const auto found = stored.erase(prefix + "lora_A.weight") + stored.erase(prefix + "lora_B.weight");
      if (found > 0) {  // a missing one is an error when tensors are read
        targets.push_back(item.key());
      }
    }
  }
  std::vector<std::string> left;
  for (const auto& [key, tensor] : stored) {
    left.push_back(key);
  }
  TESSERA_CHECK(
      CheckpointError, left.empty(),
      "{}: tensors that are no adapter of a linear layer of this {} (GPT-2's c_attn is three layers here, and "
      "cannot be read): {}",
      tensor_file(folder), model->config.model_type, fmt::join(left, ", "));
  TESSERA_CHECK(CheckpointError, !targets.empty(), "{}: no adapters", tensor_file(folder));
  return targets;
}

/// Returns the config of the model's adapters.
LoraConfig own_config(const Decoder& model) {
  const auto layers = lora_layers(model);
  TESSERA_CHECK(StateError, !layers.empty(), "save_adapter: the model has no adapters");
  const auto& adapter = *layers[0].adapter;
  LoraConfig config{.target_modules = {},
                    .r = adapter.scale.r,
                    .lora_alpha = adapter.scale.lora_alpha,
                    .use_rslora = adapter.scale.use_rslora,
                    .lora_dropout = adapter.dropout};
  for (const auto& layer : layers) {
    config.target_modules.push_back(layer.path);
  }
  return config;
}

/// Returns PEFT's target_modules, which match the end of a path: the last name, if all layers with that name have
/// adapters.
std::vector<std::string> format_targets(const Decoder& model, const LoraConfig& config) {
  std::map<std::string, std::vector<std::string>> without;  // by last name
  std::map<std::string, std::vector<std::string>> with;
  for (const auto& item : model->named_modules("", /*include_self=*/false)) {
    if (dynamic_cast<const torch::nn::LinearImpl*>(item.value().get())) {
      const auto path = stored_path(model, item.key());
      const bool is_target = std::ranges::find(config.target_modules, item.key()) != config.target_modules.end();
      TESSERA_CHECK(NotImplementedError, path || !is_target,
                    "save_adapter: \"{}\" has an adapter, but PEFT's {} has query, key and value in one matrix, with "
                    "one adapter; call merge_lora and save_pretrained, or leave these out of target_modules",
                    item.key(), model->config.model_type);
      if (path) {
        (is_target ? with : without)[last_name(*path)].push_back(*path);
      }
    }
  }
  std::vector<std::string> targets;
  for (const auto& [name, paths] : with) {
    if (without.contains(name)) {
      targets.insert(targets.end(), paths.begin(), paths.end());
    } else {
      targets.push_back(name);
    }
  }
  return targets;
}

std::string format_adapter_config(const Decoder& model) {
  const auto config = own_config(model);
  const bool is_whole = config.lora_alpha == std::floor(config.lora_alpha) && config.lora_alpha < 1e9;
  const Json out = {{"peft_type", "LORA"},
                    {"task_type", "CAUSAL_LM"},
                    {"base_model_name_or_path", model->source.empty() ? Json() : Json(model->source)},
                    {"inference_mode", true},
                    {"r", config.r},
                    {"lora_alpha", is_whole ? Json(static_cast<int64_t>(config.lora_alpha)) : Json(config.lora_alpha)},
                    {"use_rslora", config.use_rslora},
                    {"lora_dropout", config.lora_dropout},
                    {"target_modules", format_targets(model, config)},
                    {"bias", "none"},
                    {"fan_in_fan_out", model->config.model_type == "gpt2"},  // Conv1D
                    {"init_lora_weights", true}};
  return out.dump(2) + "\n";
}

void check_same_adapters(const LoraConfig& own, const LoraConfig& read, const std::string& folder) {
  const auto shown = [](const LoraConfig& config) {
    auto paths = config.target_modules;
    std::ranges::sort(paths);
    return fmt::format("r {}, lora_alpha {}, use_rslora {}, layers ({})", config.r, config.lora_alpha,
                       config.use_rslora, fmt::join(paths, ", "));
  };
  TESSERA_CHECK(ValueError, shown(own) == shown(read),
                "load_adapter: {} has adapters with {}; the model's have {}. Load it with from_pretrained's option "
                "adapter, or into a model without adapters",
                folder, shown(read), shown(own));
}

/// Returns the adapters' tensors by PEFT's keys. Throws StateError inside forward or backward.
dcp::StateDict adapter_tensors(const Decoder& model) {
  dcp::StateDict state;
  const auto all = dcp::get_model_state_dict(model);
  for (const auto& layer : lora_layers(model)) {
    const auto path = stored_path(model, layer.path);
    for (const std::string name : {".lora_A.weight", ".lora_B.weight"}) {
      state[std::string(kAdapterPrefix) + *path + name] = all.at(layer.path + name);
    }
  }
  return state;
}

}  // namespace

void save_adapter(Decoder& model, const std::string& folder) {
  const auto ranks = dcp::RankSync::all();
  std::string text;
  ranks.on_all_ranks([&] { text = format_adapter_config(model); });
  ranks.on_rank0([&] { dcp::make_folder(folder); });
  dcp::export_safetensors(tensor_file(folder), adapter_tensors(model));
  ranks.on_rank0([&] {
    dcp::write_text(config_file(folder), text);
    dcp::sync_folder(folder);
  });
}

void load_adapter(Decoder& model, const std::string& folder) {
  const auto config = read_adapter_config(model, folder);
  if (lora_layers(model).empty()) {
    add_lora(model, config);
  }
  check_same_adapters(own_config(model), config, folder);
  dcp::State state{.model = adapter_tensors(model)};
  dcp::load(tensor_file(folder), state);
}

LoraConfig read_adapter_config(const Decoder& model, const std::string& folder) {
  LoraConfig config;
  dcp::RankSync::all().on_all_ranks([&] {
    config = read_numbers(folder);
    config.target_modules = read_targets(model, folder);
  });
  return config;
}

}  // namespace tessera::models
