#pragma once
// tessera.json, the commit file of a checkpoint: which files belong to it, a checksum of every tensor in blocks, and
// the values that are no tensors. A folder without it is no checkpoint of ours, or one that was never finished.
//
//   {"tessera_checkpoint": 1, "checksum": "<of content>", "content": {
//      "files": {"model-00001-of-00001.safetensors": {"section": "model", "bytes": 4096, "header": "<checksum>",
//        "tensors": {"in.weight": [[[0, 0], [9, 5], "<checksum>"], [[9, 0], [8, 5], "<checksum>"]]}}},
//      "values": {"user": {"step": {"int": 100}}, ...}}}
//
// A block is a part of a tensor that one rank wrote: its offsets, its sizes, and the XXH3 hash (64 bits, hexadecimal)
// of its row-major bytes. Blocks of a tensor do not overlap and cover it. A value that is a double is text,
// {"double": "-0x1.8p-1"}, also "inf" or "nan": exact to the bit.
//
// Readers of a later version must read every earlier one; "tessera_checkpoint" counts them.
// Thread safety: values.

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/box.h"
#include "checkpoint/format/value.h"

namespace tessera::dcp {

inline constexpr const char* kManifestName = "tessera.json";
inline constexpr const char* kIndexName = "model.safetensors.index.json";
inline constexpr int kManifestVersion = 1;

struct CheckedBlock {
  Box box;
  uint64_t hash = 0;
  bool operator==(const CheckedBlock&) const = default;
};

struct ManifestFile {
  Section section = Section::Model;
  uint64_t bytes = 0;
  uint64_t header_hash = 0;  // of the file's first bytes, its length included
  std::map<std::string, std::vector<CheckedBlock>> tensors;
  bool operator==(const ManifestFile&) const = default;
};

struct Manifest {
  std::map<std::string, ManifestFile> files;
  std::map<Section, Values> values;
  bool operator==(const Manifest&) const = default;
};

/// Throws ValueError for a text that is not UTF-8.
std::string format_manifest(const Manifest& manifest);
/// Throws CheckpointError that names `file`: not JSON, damaged, of a later version, or with a file name that leaves the
/// folder.
Manifest parse_manifest(std::string_view text, const std::string& file);

/// The index of a Hugging Face folder: which file holds which tensor.
std::string format_index(const std::map<std::string, std::string>& weight_map, uint64_t total_bytes);
/// Throws CheckpointError that names `file` for anything that is no index, or has a file name that leaves the folder.
std::map<std::string, std::string> parse_index(std::string_view text, const std::string& file);

/// XXH3, 64 bits.
uint64_t hash_bytes(const void* data, size_t bytes);

/// The values as JSON text, exact to the bit, and back: what ranks tell each other.
std::string format_values(const std::map<Section, Values>& values);
std::map<Section, Values> parse_values(std::string_view text, const std::string& file);

/// What PyTorch's distributed checkpoint adds to the metadata of a file that holds parts of tensors: where each part
/// begins in its tensor. Throws CheckpointError that names `file`.
std::map<std::string, Sizes> parse_sharding_info(std::string_view text, const std::string& file);

}  // namespace tessera::dcp
