#include "checkpoint/io/checkpoint_index.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <set>
#include <string_view>

#include "checkpoint/format/checkpoint_error.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/io/file_io.h"

namespace tessera::dcp {

namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMaxManifestBytes = uint64_t{1} << 30;
constexpr const char* kShardingInfo = "DCP_SHARDING_INFO";

struct OpenedFile {
  std::string path;
  uint64_t bytes = 0;
  uint64_t header_hash = 0;
  uint64_t data_begin = 0;
  SafetensorsHeader header;
};

OpenedFile open_safetensors(const std::string& path) {
  const File file = File::open(path);
  OpenedFile opened{.path = path, .bytes = file.size(), .header = {}};
  std::string bytes(std::min(kLengthBytes, opened.bytes), '\0');
  file.read(bytes.data(), bytes.size(), 0);
  const uint64_t length = parse_header_length(bytes, opened.bytes, path);
  opened.data_begin = kLengthBytes + length;
  bytes.resize(opened.data_begin);
  file.read(bytes.data() + kLengthBytes, length, kLengthBytes);
  opened.header_hash = hash_bytes(bytes.data(), bytes.size());
  opened.header =
      parse_safetensors_header(std::string_view(bytes).substr(kLengthBytes), opened.bytes - opened.data_begin, path);
  return opened;
}

void check_cover(const std::string& file, const SafetensorsEntry& entry, const std::vector<CheckedBlock>& blocks) {
  std::vector<ShardSlice> slices;
  for (const auto& block : blocks) {
    slices.push_back(block.slice);
  }
  check_cover(entry.key, entry.sizes, slices, [&](size_t) -> const std::string& { return file; });
}

void check_cover(const std::string& key, const StoredTensor& tensor) {
  std::vector<ShardSlice> slices;
  for (const auto& part : tensor.parts) {
    slices.push_back(part.slice);
  }
  check_cover(key, tensor.sizes, slices, [&](size_t i) -> const std::string& { return tensor.parts[i].file; });
}

/// Returns the key within its section.
std::string own_key(const ManifestFile& described, const std::string& key, const std::string& file) {
  if (described.section == Section::Model) {
    return key;
  }
  const std::string prefix = section_name(described.section) + ".";
  TESSERA_CHECK(CheckpointError, key.starts_with(prefix), "{}: tensor '{}' does not belong to section '{}'", file, key,
                section_name(described.section));
  return key.substr(prefix.size());
}

void add_own_file(CheckpointIndex& index, const std::string& name, const ManifestFile& described) {
  const auto opened = open_safetensors(index.path + "/" + name);
  TESSERA_CHECK(CheckpointError, opened.bytes == described.bytes,
                "{}: {} bytes, but {} were saved; truncated or replaced", opened.path, opened.bytes, described.bytes);
  TESSERA_CHECK(CheckpointError, opened.header_hash == described.header_hash,
                "{}: the checksum of its header does not hold; the file is damaged or replaced", opened.path);
  TESSERA_CHECK(CheckpointError, opened.header.entries.size() == described.tensors.size(),
                "{}: {} tensors, but {} has {}", opened.path, opened.header.entries.size(), kManifestName,
                described.tensors.size());
  for (const auto& entry : opened.header.entries) {
    const auto blocks = described.tensors.find(entry.key);
    TESSERA_CHECK(CheckpointError, blocks != described.tensors.end(), "{}: tensor '{}' is not in {}", opened.path,
                  entry.key, kManifestName);
    check_cover(opened.path, entry, blocks->second);
    const auto key = own_key(described, entry.key, opened.path);
    const auto [place, is_new] = index.tensors[described.section].try_emplace(
        key, StoredTensor{.dtype = entry.dtype,
                          .sizes = entry.sizes,
                          .parts = {{.file = opened.path,
                                     .offset = opened.data_begin + entry.begin,
                                     .slice = ShardSlice::whole(entry.sizes),
                                     .blocks = blocks->second}},
                          .unknown_dtype = entry.unknown_dtype});
    TESSERA_CHECK(CheckpointError, is_new, "{}: tensor '{}' is in {} too; a checkpoint has it once", opened.path,
                  entry.key, place->second.parts[0].file);
  }
}

/// Adds a part, growing the tensor's sizes to include it.
void add_part(StoredTensor& tensor, StoredPart part) {
  for (size_t dim = 0; dim < part.slice.sizes.size(); ++dim) {
    tensor.sizes[dim] = std::max(tensor.sizes[dim], part.slice.offsets[dim] + part.slice.sizes[dim]);
  }
  tensor.parts.push_back(std::move(part));
}

ShardSlice foreign_slice(const SafetensorsEntry& entry, const std::map<std::string, Sizes>& offsets,
                         const std::string& file) {
  ShardSlice slice = ShardSlice::whole(entry.sizes);
  if (const auto found = offsets.find(entry.key); found != offsets.end()) {
    slice.offsets = found->second;
  }
  bool fits = slice.offsets.size() == slice.sizes.size();
  for (size_t dim = 0; fits && dim < slice.sizes.size(); ++dim) {
    fits = slice.offsets[dim] <= INT64_MAX - slice.sizes[dim];
  }
  TESSERA_CHECK(CheckpointError, fits, "{}: the offsets of tensor '{}' do not fit its {} dims", file, entry.key,
                slice.sizes.size());
  return slice;
}

/// `is_wanted` returns whether the folder's index assigns the tensor to this file.
void add_foreign_file(std::map<std::string, StoredTensor>& tensors, const OpenedFile& opened,
                      const std::function<bool(const std::string& key)>& is_wanted) {
  std::map<std::string, Sizes> offsets;
  if (const auto info = opened.header.metadata.find(kShardingInfo); info != opened.header.metadata.end()) {
    offsets = parse_sharding_info(info->second, opened.path);
  }
  for (const auto& entry : opened.header.entries) {
    if (!is_wanted(entry.key)) {
      continue;
    }
    auto [place, is_new] = tensors.try_emplace(entry.key, StoredTensor{.dtype = entry.dtype,
                                                                       .sizes = Sizes(entry.sizes.size(), 0),
                                                                       .parts = {},
                                                                       .unknown_dtype = entry.unknown_dtype});
    TESSERA_CHECK(CheckpointError,
                  is_new || (place->second.dtype == entry.dtype && place->second.unknown_dtype == entry.unknown_dtype &&
                             offsets.count(entry.key) == 1 && place->second.sizes.size() == entry.sizes.size()),
                  "{}: tensor '{}' is in another file too, and not as a part of the same tensor", opened.path,
                  entry.key);
    add_part(place->second, {.file = opened.path,
                             .offset = opened.data_begin + entry.begin,
                             .slice = foreign_slice(entry, offsets, opened.path),
                             .blocks = {}});
  }
}

/// A folder that another tool wrote, or a single file.
struct ForeignFolder {
  std::vector<std::string> files = {};            // paths
  std::map<std::string, std::string> index = {};  // file of each tensor; empty without an index
  std::string index_path = {};
};

/// Removes "-00001-of-00002" from the end.
std::string without_number(std::string name) {
  constexpr std::string_view form = "-00000-of-00000";
  const auto has_form = [&](std::string_view end) {
    return std::ranges::equal(end, form, [](char c, char f) { return f == '0' ? c >= '0' && c <= '9' : c == f; });
  };
  if (name.size() > form.size() && has_form(std::string_view(name).substr(name.size() - form.size()))) {
    name.resize(name.size() - form.size());
  }
  return name;
}

/// Parsed name of Hugging Face tools: "model.fp16-00001-of-00002.safetensors", or the older
/// "model-00001-of-00002.fp16.safetensors", has the weights "model" in the variant "fp16".
struct WeightsName {
  explicit WeightsName(const std::string& file) {
    const auto stem = without_number(fs::path(file).stem().string());
    const auto dot = stem.rfind('.');
    weights = without_number(stem.substr(0, dot));
    variant = dot == std::string::npos ? "" : stem.substr(dot + 1);
  }
  std::string weights, variant;
};

/// Returns the .safetensors files of a variant ("" for none). Names of other programs may contain unrelated dots, such
/// as "v1.5.safetensors", so a variant must follow a name that Hugging Face tools use, or the name of another file in
/// the folder. Ignores hidden files, such as those of a Mac for metadata.
std::vector<std::string> files_of_variant(const std::string& folder, const std::string& variant) {
  std::vector<std::string> names;
  std::set<std::string> weights = {"model", "diffusion_pytorch_model", "adapter_model", "pytorch_model"};
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    if (entry.path().extension() == ".safetensors" && !name.starts_with('.')) {
      names.push_back(name);
      if (const WeightsName parts(name); parts.variant.empty()) {
        weights.insert(parts.weights);
      }
    }
  }
  std::set<std::string> others;
  std::vector<std::string> files;
  for (const auto& name : names) {
    const WeightsName parts(name);
    const auto own = weights.contains(parts.weights) ? parts.variant : "";
    if (own == variant) {
      files.push_back(folder + "/" + name);
    } else {
      others.insert(own.empty() ? "none" : "'" + own + "'");
    }
  }
  const auto wanted = variant.empty() ? "" : fmt::format(" of the variant '{}'", variant);
  TESSERA_CHECK(CheckpointError, !files.empty(),
                "{}: is no checkpoint: there is no {}, no {} and no .safetensors file{}{}", folder, kManifestName,
                kIndexName, wanted,
                others.empty() ? "" : fmt::format("; the variants that it has: {}", fmt::join(others, ", ")));
  return files;
}

/// Returns the index of a variant, by the names of transformers and diffusers, including old ones; "" if there is none.
std::string find_index(const std::string& folder, const std::string& variant) {
  const auto end = variant.empty() ? "" : "." + variant;
  std::vector<std::string> found;
  for (const std::string weights : {"model", "diffusion_pytorch_model"}) {
    std::set<std::string> names = {weights + ".safetensors.index" + end + ".json",
                                   weights + ".safetensors" + end + ".index.json",
                                   weights + end + ".safetensors.index.json"};
    for (const auto& name : names) {
      if (fs::exists(folder + "/" + name)) {
        found.push_back(folder + "/" + name);
      }
    }
  }
  TESSERA_CHECK(CheckpointError, found.size() <= 1,
                "{}: and {} are two indexes of one folder; keep the one of the model that is to be loaded", found[0],
                found[1]);
  return found.empty() ? "" : found[0];
}

ForeignFolder list_foreign(const std::string& folder, const std::string& variant) {
  ForeignFolder found{.index_path = find_index(folder, variant)};
  auto& [files, index, path] = found;
  if (path.empty()) {
    files = files_of_variant(folder, variant);
  } else {
    index = parse_index(read_text(path, kMaxHeaderBytes), path);
    TESSERA_CHECK(CheckpointError, !index.empty(), "{}: names no tensor", path);
    for (const auto& [key, name] : index) {
      files.push_back(folder + "/" + name);
    }
  }
  std::sort(files.begin(), files.end());
  files.erase(std::unique(files.begin(), files.end()), files.end());
  return found;
}

/// Adds another tool's tensors. With an index, takes each tensor only from the file that it names, because files may
/// also have others, such as older ones with the same names.
void add_foreign(CheckpointIndex& index, const ForeignFolder& folder) {
  auto& tensors = index.tensors[Section::Model];
  for (const auto& file : folder.files) {
    const auto name = fs::path(file).filename().string();
    add_foreign_file(tensors, open_safetensors(file), [&](const std::string& key) {
      const auto place = folder.index.find(key);
      return folder.index.empty() || (place != folder.index.end() && place->second == name);
    });
  }
  for (const auto& [key, name] : folder.index) {
    TESSERA_CHECK(CheckpointError, tensors.contains(key), "{}: has tensor '{}' in file '{}', which lacks it",
                  folder.index_path, key, name);
  }
  for (const auto& [key, tensor] : tensors) {
    check_cover(key, tensor);
  }
}

}  // namespace

CheckpointIndex open_checkpoint(const std::string& path, const std::string& variant) {
  CheckpointIndex index{.path = path, .tensors = {}, .values = {}};
  TESSERA_CHECK(CheckpointError, fs::exists(path), "{}: there is no such file or folder", path);
  const std::string manifest_path = path + "/" + kManifestName;
  const bool is_folder = fs::is_directory(path), is_own = is_folder && fs::exists(manifest_path);
  TESSERA_CHECK(CheckpointError, variant.empty() || (is_folder && !is_own),
                "{}: is {}, which has no variant '{}'; only folders of other tools have variants", path,
                is_own ? "a checkpoint of this library" : "a file", variant);
  if (!is_folder) {
    add_foreign(index, {.files = {path}});
  } else if (is_own) {
    const auto manifest = parse_manifest(read_text(manifest_path, kMaxManifestBytes), manifest_path);
    for (const auto& [name, described] : manifest.files) {
      add_own_file(index, name, described);
    }
    index.values = manifest.values;
  } else {
    add_foreign(index, list_foreign(path, variant));
  }
  return index;
}

}  // namespace tessera::dcp
