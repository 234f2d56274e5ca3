#include "models/pretrained.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

#include "base/cast.h"
#include "base/error.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/io/checkpoint_index.h"
#include "checkpoint/io/file_io.h"
#include "checkpoint/io/read_tensor.h"
#include "checkpoint/local_part.h"
#include "checkpoint/ranks/rank_sync.h"
#include "dtensor/dtensor.h"
#include "fully_shard/to_empty.h"
#include "models/adapter.h"
#include "models/weight_names.h"
#include "nn/meta_device.h"

namespace tessera::models {

namespace {

constexpr int64_t kStagedBytes = 8 << 20;  // host memory (or one tensor) for tensors that cannot be read in place
constexpr std::array kCopiedFiles = {"tokenizer.json",     "tokenizer_config.json",
                                     "tokenizer.model",    "special_tokens_map.json",
                                     "added_tokens.json",  "vocab.json",
                                     "merges.txt",         "chat_template.jinja",
                                     "chat_template.json", "generation_config.json"};

using StoredTensors = std::map<std::string, dcp::StoredTensor>;

/// Part of a stored tensor, and its destination.
struct Request {
  std::string key;
  dcp::ShardSlice slice;  // of the stored tensor
  at::Tensor target;      // has the slice's sizes; a view of this rank's shard of a parameter
  bool is_copy = false;   // whether this is a second copy of a tied weight, only to be compared
  const dcp::StoredTensor* stored = nullptr;
  at::Tensor staged = {};

  bool reads_in_place() const { return !is_copy && target.is_contiguous() && target.device().is_cpu(); }
};

struct Requests {
  std::vector<Request> all;
  std::vector<std::string> missing;
  std::vector<std::string> misfits;
  std::set<std::string> used;
};

/// Finds a key, with or without the prefix that checkpoints of the bare model omit.
const StoredTensors::value_type* find_stored(const StoredTensors& tensors, const std::string& model_type,
                                             const std::string& key) {
  auto found = tensors.find(key);
  const auto prefix = optional_prefix(model_type);
  if (found == tensors.end() && key.starts_with(prefix)) {
    found = tensors.find(key.substr(prefix.size()));
  }
  return found == tensors.end() ? nullptr : &*found;
}

/// Adds a request; `sizes` are those that the stored tensor must have.
void add_request(Requests& requests, const StoredTensors::value_type& stored, const dcp::Sizes& sizes,
                 Request request) {
  const auto dtype = request.target.scalar_type();
  requests.used.insert(stored.first);
  request.stored = &stored.second;
  if (stored.second.sizes != sizes) {
    requests.misfits.push_back(fmt::format("{} [{}], the model's has [{}]", stored.first,
                                           fmt::join(stored.second.sizes, ", "), fmt::join(sizes, ", ")));
  } else if (!stored.second.unknown_dtype.empty() || !may_cast(stored.second.dtype, dtype)) {
    requests.misfits.push_back(fmt::format(
        "{} of dtype {}, the model's has {}", stored.first,
        stored.second.unknown_dtype.empty() ? c10::toString(stored.second.dtype) : stored.second.unknown_dtype,
        c10::toString(dtype)));
  }
  if (request.slice.numel() > 0) {
    requests.all.push_back(std::move(request));
  }
}

/// Adds a parameter that is a whole stored tensor, or one of its parts.
void add_whole(Requests& requests, const StoredTensors::value_type& stored, const WeightSource& source,
               const dcp::LocalPart& part) {
  dcp::Sizes sizes = part.sizes;
  Request request{.key = source.key, .slice = part.slice, .target = part.local};
  if (source.parts > 1) {
    request.slice.offsets[0] += source.part * sizes[0];
    sizes[0] *= source.parts;
  }
  if (source.is_transposed) {
    std::swap(request.slice.offsets[0], request.slice.offsets[1]);
    std::swap(request.slice.sizes[0], request.slice.sizes[1]);
    std::swap(sizes[0], sizes[1]);
    request.target = request.target.t();
  }
  add_request(requests, stored, sizes, std::move(request));
}

/// Adds a parameter's expert, unless this rank does not have it.
void add_expert(Requests& requests, const StoredTensors::value_type& stored, const WeightSource& source,
                const dcp::LocalPart& part, int64_t expert) {
  const auto& [offsets, sizes] = part.slice;
  Request request{.key = source.key_of(expert),
                  .slice = {.offsets = {offsets.begin() + 1, offsets.end()}, .sizes = {sizes.begin() + 1, sizes.end()}},
                  .target = part.local};
  if (expert >= offsets[0] && expert < offsets[0] + sizes[0]) {
    request.target = part.local.select(0, expert - offsets[0]);
  } else {
    request.slice.sizes[0] = 0;
  }
  add_request(requests, stored, {part.sizes.begin() + 1, part.sizes.end()}, std::move(request));
}

void add_parameter(Requests& requests, const StoredTensors& tensors, const std::string& model_type,
                   const dcp::LocalPart& part) {
  const auto source = weight_source(model_type, part.key);
  const int64_t count = source.by_expert ? part.sizes[0] : 1;
  for (int64_t i = 0; i < count; ++i) {
    const auto key = source.by_expert ? source.key_of(i) : source.key;
    const auto* const stored = find_stored(tensors, model_type, key);
    if (!stored) {
      requests.missing.push_back(key);
    } else if (source.by_expert) {
      add_expert(requests, *stored, source, part, i);
    } else {
      add_whole(requests, *stored, source, part);
    }
  }
}

/// Throws CheckpointError that lists all tensors of the folder that do not match the model.
std::vector<Request> make_requests(const Decoder& model, const std::string& folder, const StoredTensors& tensors) {
  const auto& type = model->config.model_type;
  Requests requests;
  for (const auto& item : model->named_parameters()) {
    if (!is_lora_parameter(item.key())) {
      add_parameter(requests, tensors, type, dcp::local_part(dcp::Section::Model, item.key(), item.value()));
    }
  }
  if (const auto* copy = find_stored(tensors, type, "lm_head.weight"); copy && model->config.tie_word_embeddings) {
    const auto part = dcp::local_part(dcp::Section::Model, "lm_head.weight", model->embed_tokens->weight);
    add_request(requests, *copy, part.sizes,
                {.key = copy->first, .slice = part.slice, .target = part.local, .is_copy = true});
  }
  std::vector<std::string> unexpected;
  for (const auto& [key, stored] : tensors) {
    if (!requests.used.contains(key) && !is_constant(type, key)) {
      unexpected.push_back(key);
    }
  }
  std::ranges::sort(requests.missing);
  // Each part of a missing fused tensor reports it.
  requests.missing.erase(std::unique(requests.missing.begin(), requests.missing.end()), requests.missing.end());
  TESSERA_CHECK(CheckpointError, requests.missing.empty() && unexpected.empty() && requests.misfits.empty(),
                "{}: the weights are not those of the {} that config.json describes; missing: ({}); unexpected: ({}); "
                "of other sizes or dtypes: ({})",
                folder, type, fmt::join(requests.missing, ", "), fmt::join(unexpected, ", "),
                fmt::join(requests.misfits, "; "));
  return std::move(requests.all);
}

void finish(Request& request, const std::string& folder) {
  const c10::NoGradGuard no_grad;
  if (request.is_copy) {
    TESSERA_CHECK(CheckpointError, at::equal(request.target.cpu(), request.staged),
                  "{}: tie_word_embeddings is true in config.json, but {} is not equal to the embedding; set it to "
                  "false, or remove the tensor",
                  folder, request.key);
  } else if (request.staged.defined()) {
    request.target.copy_(request.staged);
  }
  request.staged = at::Tensor();
}

/// Reads directly into the parameters if possible. Comparisons are last, in the order of requests.
void read_weights(std::vector<Request>& requests, const std::string& folder) {
  for (size_t first = 0, end = 0; first < requests.size(); first = end) {
    dcp::TensorReader reader;
    for (int64_t staged = 0; end < requests.size(); ++end) {
      Request& request = requests[end];
      at::Tensor target = request.target;
      if (!request.reads_in_place()) {
        const int64_t bytes = request.slice.numel() * request.target.element_size();
        if (staged > 0 && staged + bytes > kStagedBytes) {
          break;
        }
        staged += bytes;
        target = request.staged = at::empty(request.slice.sizes, at::TensorOptions(request.target.scalar_type()));
      }
      reader.add(*request.stored, request.key, request.slice, target);
    }
    reader.run([&](size_t i) { finish(requests[first + i], folder); });
  }
}

void load_weights(const Decoder& model, const std::string& folder, const std::string& variant,
                  const dcp::RankSync& ranks) {
  dcp::CheckpointIndex index;
  std::vector<Request> requests;
  ranks.on_all_ranks([&] {
    index = dcp::open_checkpoint(folder, variant);
    requests = make_requests(model, folder, index.tensors[dcp::Section::Model]);
  });
  ranks.on_all_ranks([&] { read_weights(requests, folder); });
}

DecoderConfig read_shared_config(const std::string& folder, const FromPretrainedOptions& options,
                                 const dcp::RankSync& ranks) {
  DecoderConfig config;
  const auto texts = ranks.exchange([&] {
    config = read_config(folder + "/config.json", options.ignored_config_keys);
    if (options.dtype) {
      TESSERA_CHECK(ValueError, c10::isFloatingType(*options.dtype),
                    "from_pretrained: dtype {} of the parameters; it must be floating", c10::toString(*options.dtype));
      config.dtype = *options.dtype;
    }
    return format_config(config);
  });
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    TESSERA_CHECK(ValueError, texts[rank] == texts[0],
                  "from_pretrained: rank {} reads another config.json, or another dtype, than rank 0: {} and {}", rank,
                  texts[rank], texts[0]);
  }
  return config;
}

void add_adapters(Decoder& model, const FromPretrainedOptions& options) {
  TESSERA_CHECK(ValueError, !options.lora || options.adapter.empty(),
                "from_pretrained: lora and adapter are both given; \"{}\" has a config of its own", options.adapter);
  if (!options.adapter.empty()) {
    add_lora(model, read_adapter_config(model, options.adapter));
  } else if (options.lora) {
    add_lora(model, *options.lora);
  }
}

/// Returns one stored tensor, joined from the parameters that are its parts.
at::Tensor joined(std::vector<at::Tensor> parts, bool is_transposed) {
  if (parts.size() > 1) {
    for (auto& part : parts) {
      if (is_dtensor(part)) {  // so that joining does not gather a matrix
        const Placement placement = part.dim() == 2 ? Placement(Shard(1)) : Placement(Replicate());
        part = redistribute(part, Placements(placements(part).size(), placement));
      }
    }
    parts = {at::cat(parts, 0)};
  }
  return is_transposed ? parts[0].t() : parts[0];
}

/// Adds the tensors of a parameter's experts, [experts, ...].
void add_experts(dcp::StateDict& state, const WeightSource& source, at::Tensor experts) {
  if (is_dtensor(experts)) {  // so that each rank has a part of every expert
    auto placed = placements(experts);
    for (auto& placement : placed) {
      placement = placement.is_shard(0) ? Placement(Shard(1)) : placement;
    }
    experts = redistribute(experts, placed);
  }
  for (int64_t expert = 0; expert < experts.size(0); ++expert) {
    state[source.key_of(expert)] = experts.select(0, expert);
  }
}

/// Returns tensors in the form of the family's checkpoints. Collective.
dcp::StateDict stored_tensors(const Decoder& model) {
  const c10::NoGradGuard no_grad;
  struct Parts {
    std::map<int, at::Tensor> tensors;
    bool is_transposed = false;
  };
  std::map<std::string, Parts> by_key;
  dcp::StateDict state;
  for (auto& [name, value] : dcp::get_model_state_dict(model)) {
    const auto source = weight_source(model->config.model_type, name);
    if (source.by_expert) {
      add_experts(state, source, std::get<at::Tensor>(value));
      continue;
    }
    auto& parts = by_key[source.key];
    parts.tensors[source.part] = std::get<at::Tensor>(value);
    parts.is_transposed = source.is_transposed;
  }
  for (auto& [key, parts] : by_key) {
    std::vector<at::Tensor> tensors;
    for (auto& [part, tensor] : parts.tensors) {
      tensors.push_back(tensor);
    }
    state[key] = joined(std::move(tensors), parts.is_transposed);
  }
  return state;
}

}  // namespace

Decoder from_pretrained(const std::string& folder, const FromPretrainedOptions& options) {
  const auto ranks = dcp::RankSync::all();
  const auto config = read_shared_config(folder, options, ranks);
  Decoder model{nullptr};
  {
    const MetaDeviceGuard on_meta;
    model = Decoder(config);
    model->to(config.dtype);
  }
  add_adapters(model, options);
  at::Device device = options.device;
  if (options.mesh) {
    lay_out(model, *options.mesh, options.layout);
    device = at::Device(options.mesh->device_type());
  }
  to_empty(model, device);
  load_weights(model, folder, options.variant, ranks);
  model->source = folder;
  if (!options.adapter.empty()) {
    load_adapter(model, options.adapter);
  } else {
    reset_lora(model);
  }
  return model;
}

void save_pretrained(Decoder& model, const std::string& folder, const SavePretrainedOptions& options) {
  TESSERA_CHECK(StateError, lora_layers(model).empty(),
                "save_pretrained: the model has adapters; call merge_lora first, or save_adapter for these alone");
  const auto ranks = dcp::RankSync::all();
  std::string text;
  ranks.on_all_ranks([&] {
    DecoderConfig config = model->config;
    config.dtype = model->embed_tokens->weight.scalar_type();
    text = format_config(config);
  });
  dcp::save(folder, {.model = stored_tensors(model)}, {.max_file_bytes = options.max_file_bytes});
  ranks.on_rank0([&] {
    for (const std::string name : kCopiedFiles) {
      const std::filesystem::path source = std::filesystem::path(model->source) / name;
      if (!model->source.empty() && std::filesystem::is_regular_file(source)) {
        std::filesystem::copy_file(source, std::filesystem::path(folder) / name);
      }
    }
    dcp::write_text(folder + "/config.json", text);
    dcp::sync_folder(folder);
  });
}

}  // namespace tessera::models
