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
#include "checkpoint/rank_sync.h"
#include "dtensor/dtensor.h"
#include "fully_shard/to_empty.h"
#include "models/adapter.h"
#include "models/weight_names.h"
#include "nn/meta_device.h"

namespace tessera::models {

namespace {

constexpr int64_t kBytesAtOnce = int64_t{256} << 20;  // host memory for what is read
constexpr std::array kCopiedFiles = {"tokenizer.json",     "tokenizer_config.json",
                                     "tokenizer.model",    "special_tokens_map.json",
                                     "added_tokens.json",  "vocab.json",
                                     "merges.txt",         "chat_template.jinja",
                                     "chat_template.json", "generation_config.json"};

using StoredTensors = std::map<std::string, dcp::StoredTensor>;

/// This rank's shard of a parameter, and where it is stored.
struct Request {
  dcp::LocalPart part;
  const dcp::StoredTensor* stored = nullptr;
  WeightSource source;
  bool is_copy = false;  // a second one of a tied weight, to compare with
  at::Tensor staged = {};

  /// Returns the part as a slice of the stored tensor.
  dcp::ShardSlice stored_slice() const {
    dcp::ShardSlice slice = part.slice;
    if (source.parts > 1) {
      slice.offsets[0] += source.part * part.sizes[0];
    }
    if (source.is_transposed) {
      std::swap(slice.offsets[0], slice.offsets[1]);
      std::swap(slice.sizes[0], slice.sizes[1]);
    }
    return slice;
  }
  dcp::Sizes stored_sizes() const {
    dcp::Sizes sizes = part.sizes;
    if (source.parts > 1) {
      sizes[0] *= source.parts;
    }
    if (source.is_transposed) {
      std::swap(sizes[0], sizes[1]);
    }
    return sizes;
  }
};

struct Requests {
  std::vector<Request> all;
  std::vector<std::string> missing;
  std::vector<std::string> misfits;
  std::set<std::string> used;
};

/// Finds a key, also without the prefix that checkpoints of the bare model leave out.
const StoredTensors::value_type* find_stored(const StoredTensors& tensors, const std::string& model_type,
                                             const std::string& key) {
  auto found = tensors.find(key);
  const auto prefix = optional_prefix(model_type);
  if (found == tensors.end() && key.starts_with(prefix)) {
    found = tensors.find(key.substr(prefix.size()));
  }
  return found == tensors.end() ? nullptr : &*found;
}

void add_request(Requests& requests, const StoredTensors::value_type& stored, Request request) {
  requests.used.insert(stored.first);
  request.stored = &stored.second;
  if (stored.second.sizes != request.stored_sizes()) {
    requests.misfits.push_back(fmt::format("{} [{}], the model's has [{}]", stored.first,
                                           fmt::join(stored.second.sizes, ", "),
                                           fmt::join(request.stored_sizes(), ", ")));
  } else if (!stored.second.unknown_dtype.empty() || !may_cast(stored.second.dtype, request.part.local.scalar_type())) {
    requests.misfits.push_back(fmt::format(
        "{} of dtype {}, the model's has {}", stored.first,
        stored.second.unknown_dtype.empty() ? c10::toString(stored.second.dtype) : stored.second.unknown_dtype,
        c10::toString(request.part.local.scalar_type())));
  }
  requests.all.push_back(std::move(request));
}

/// Throws CheckpointError that lists all tensors of the folder that do not fit the model.
std::vector<Request> make_requests(const Decoder& model, const std::string& folder, const StoredTensors& tensors) {
  const auto& type = model->config.model_type;
  Requests requests;
  for (const auto& item : model->named_parameters()) {
    if (is_lora_parameter(item.key())) {
      continue;
    }
    Request request{.part = dcp::local_part(dcp::Section::Model, item.key(), item.value()),
                    .source = weight_source(type, item.key())};
    if (const auto* stored = find_stored(tensors, type, request.source.key)) {
      add_request(requests, *stored, std::move(request));
    } else {
      requests.missing.push_back(request.source.key);
    }
  }
  if (const auto* copy = find_stored(tensors, type, "lm_head.weight"); copy && model->config.tie_word_embeddings) {
    add_request(requests, *copy,
                {.part = dcp::local_part(dcp::Section::Model, "lm_head.weight", model->embed_tokens->weight),
                 .source = {.key = copy->first},
                 .is_copy = true});
  }
  std::vector<std::string> unexpected;
  for (const auto& [key, stored] : tensors) {
    if (!requests.used.contains(key) && !is_constant(type, key)) {
      unexpected.push_back(key);
    }
  }
  std::ranges::sort(requests.missing);
  // A fused tensor is missed by each of its parts.
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
  const auto read = request.source.is_transposed ? request.staged.t() : request.staged;
  if (request.is_copy) {
    TESSERA_CHECK(CheckpointError, at::equal(request.part.local.cpu(), read),
                  "{}: tie_word_embeddings is true in config.json, but {} is not equal to the embedding; set it to "
                  "false, or remove the tensor",
                  folder, request.source.key);
  } else {
    request.part.local.copy_(read);
  }
  request.staged = at::Tensor();
}

/// Reads some MB at a time. Comparisons are last, as their requests are.
void read_weights(std::vector<Request>& requests, const std::string& folder) {
  for (size_t first = 0, end = 0; first < requests.size(); first = end) {
    dcp::TensorReader reader;
    for (int64_t bytes = 0; end < requests.size() && (end == first || bytes < kBytesAtOnce); ++end) {
      Request& request = requests[end];
      const auto slice = request.stored_slice();
      request.staged = at::empty(slice.sizes, at::TensorOptions(request.part.local.scalar_type()));
      bytes += static_cast<int64_t>(request.staged.nbytes());
      reader.add(*request.stored, request.source.key, slice, request.staged);
    }
    reader.run([](size_t) {});
    for (size_t i = first; i < end; ++i) {
      finish(requests[i], folder);
    }
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

/// Returns one stored tensor, made of the parameters that are its parts.
at::Tensor joined(std::vector<at::Tensor> parts, bool is_transposed) {
  if (parts.size() > 1) {
    for (auto& part : parts) {
      if (is_dtensor(part)) {  // so that the parts are put together without gathering a matrix
        const Placement placement = part.dim() == 2 ? Placement(Shard(1)) : Placement(Replicate());
        part = redistribute(part, Placements(placements(part).size(), placement));
      }
    }
    parts = {at::cat(parts, 0)};
  }
  return is_transposed ? parts[0].t() : parts[0];
}

/// Returns tensors as the family's checkpoints have them. Collective.
dcp::StateDict stored_tensors(const Decoder& model) {
  const c10::NoGradGuard no_grad;
  struct Parts {
    std::map<int, at::Tensor> tensors;
    bool is_transposed = false;
  };
  std::map<std::string, Parts> by_key;
  for (auto& [name, value] : dcp::get_model_state_dict(model)) {
    const auto source = weight_source(model->config.model_type, name);
    auto& parts = by_key[source.key];
    parts.tensors[source.part] = std::get<at::Tensor>(value);
    parts.is_transposed = source.is_transposed;
  }
  dcp::StateDict state;
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
