#include "checkpoint/catalog.h"

#include <algorithm>
#include <filesystem>
#include <functional>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/file_io.h"
#include "checkpoint/safetensors.h"

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
  std::vector<Box> boxes;
  for (const auto& block : blocks) {
    boxes.push_back(block.box);
  }
  check_cover(entry.key, entry.sizes, boxes, [&](size_t) -> const std::string& { return file; });
}

void check_cover(const std::string& key, const StoredTensor& tensor) {
  std::vector<Box> boxes;
  for (const auto& part : tensor.parts) {
    boxes.push_back(part.box);
  }
  check_cover(key, tensor.sizes, boxes, [&](size_t i) -> const std::string& { return tensor.parts[i].file; });
}

/// The key within its section.
std::string own_key(const ManifestFile& described, const std::string& key, const std::string& file) {
  if (described.section == Section::Model) {
    return key;
  }
  const std::string prefix = section_name(described.section) + ".";
  TESSERA_CHECK(CheckpointError, key.starts_with(prefix), "{}: tensor '{}' does not belong to section '{}'", file, key,
                section_name(described.section));
  return key.substr(prefix.size());
}

void add_own_file(Catalog& catalog, const std::string& name, const ManifestFile& described) {
  const auto opened = open_safetensors(catalog.path + "/" + name);
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
    const auto [place, is_new] = catalog.tensors[described.section].try_emplace(
        key, StoredTensor{.dtype = entry.dtype,
                          .sizes = entry.sizes,
                          .parts = {{.file = opened.path,
                                     .offset = opened.data_begin + entry.begin,
                                     .box = Box::whole(entry.sizes),
                                     .blocks = blocks->second}},
                          .unknown_dtype = entry.unknown_dtype});
    TESSERA_CHECK(CheckpointError, is_new, "{}: tensor '{}' is in {} too; a checkpoint has it once", opened.path,
                  entry.key, place->second.parts[0].file);
  }
}

/// The tensor's sizes grow to hold the part.
void add_part(StoredTensor& tensor, StoredPart part) {
  for (size_t dim = 0; dim < part.box.sizes.size(); ++dim) {
    tensor.sizes[dim] = std::max(tensor.sizes[dim], part.box.offsets[dim] + part.box.sizes[dim]);
  }
  tensor.parts.push_back(std::move(part));
}

Box foreign_box(const SafetensorsEntry& entry, const std::map<std::string, Sizes>& offsets, const std::string& file) {
  Box box = Box::whole(entry.sizes);
  if (const auto found = offsets.find(entry.key); found != offsets.end()) {
    box.offsets = found->second;
  }
  bool fits = box.offsets.size() == box.sizes.size();
  for (size_t dim = 0; fits && dim < box.sizes.size(); ++dim) {
    fits = box.offsets[dim] <= INT64_MAX - box.sizes[dim];
  }
  TESSERA_CHECK(CheckpointError, fits, "{}: the offsets of tensor '{}' do not fit its {} dims", file, entry.key,
                box.sizes.size());
  return box;
}

void add_foreign_file(std::map<std::string, StoredTensor>& tensors, const OpenedFile& opened) {
  std::map<std::string, Sizes> offsets;
  if (const auto info = opened.header.metadata.find(kShardingInfo); info != opened.header.metadata.end()) {
    offsets = parse_sharding_info(info->second, opened.path);
  }
  for (const auto& entry : opened.header.entries) {
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
                             .box = foreign_box(entry, offsets, opened.path),
                             .blocks = {}});
  }
}

/// A folder that we did not write.
struct ForeignFolder {
  std::vector<std::string> files;            // with the folder
  std::map<std::string, std::string> index;  // which file has which tensor; empty where the folder does not say
};

ForeignFolder list_foreign(const std::string& folder) {
  ForeignFolder found;
  auto& [files, index] = found;
  if (const auto path = folder + "/" + kIndexName; fs::exists(path)) {
    index = parse_index(read_text(path, kMaxHeaderBytes), path);
    for (const auto& [key, name] : index) {
      files.push_back(folder + "/" + name);
    }
  } else {
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (entry.path().extension() == ".safetensors") {
        files.push_back(entry.path().string());
      }
    }
  }
  std::sort(files.begin(), files.end());
  files.erase(std::unique(files.begin(), files.end()), files.end());
  TESSERA_CHECK(CheckpointError, !files.empty(), "{}: is no checkpoint: there is no {}, no {} and no .safetensors file",
                folder, kManifestName, kIndexName);
  return found;
}

void add_foreign(Catalog& catalog, const std::vector<std::string>& files) {
  auto& tensors = catalog.tensors[Section::Model];
  for (const auto& file : files) {
    add_foreign_file(tensors, open_safetensors(file));
  }
  for (const auto& [key, tensor] : tensors) {
    check_cover(key, tensor);
  }
}

}  // namespace

Catalog open_catalog(const std::string& path) {
  Catalog catalog{.path = path, .tensors = {}, .values = {}};
  TESSERA_CHECK(CheckpointError, fs::exists(path), "{}: there is no such file or folder", path);
  const std::string manifest_path = path + "/" + kManifestName;
  if (!fs::is_directory(path)) {
    add_foreign(catalog, {path});
  } else if (fs::exists(manifest_path)) {
    const auto manifest = parse_manifest(read_text(manifest_path, kMaxManifestBytes), manifest_path);
    for (const auto& [name, described] : manifest.files) {
      add_own_file(catalog, name, described);
    }
    catalog.values = manifest.values;
  } else {
    const auto [files, index] = list_foreign(path);
    add_foreign(catalog, files);
    for (const auto& [key, name] : index) {
      TESSERA_CHECK(CheckpointError, catalog.tensors[Section::Model].count(key) == 1,
                    "{}/{}: has tensor '{}' in file '{}', which lacks it", path, kIndexName, key, name);
    }
  }
  return catalog;
}

}  // namespace tessera::dcp
