#pragma once
// tessera.json, which commits a checkpoint: its files, checksums of blocks of tensors, and values.
//
//   {"tessera_checkpoint": 1, "checksum": "<of content>", "content": {
//      "files": {"model-00001-of-00001.safetensors": {"section": "model", "bytes": 4096, "header": "<checksum>",
//        "tensors": {"in.weight": [[[0, 0], [9, 5], "<checksum>"], [[9, 0], [8, 5], "<checksum>"]]}}},
//      "values": {"user": {"step": {"int": 100}}, ...}}}
//
// A block is a slice of a tensor that one rank wrote: offsets, sizes, and the XXH3 hash (64 bits, hexadecimal) of its
// row-major data. Blocks tile their tensor. Doubles are exact: {"double": "-0x1.8p-1"}, "inf", "nan".
// "tessera_checkpoint" is the format's version; later versions of the library must read all earlier ones.

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/shard_slice.h"
#include "checkpoint/format/value.h"

namespace tessera::dcp {

inline constexpr const char* kManifestName = "tessera.json";
inline constexpr const char* kIndexName = "model.safetensors.index.json";
inline constexpr int kManifestVersion = 1;

struct CheckedBlock {
  ShardSlice slice;
  uint64_t hash = 0;
  bool operator==(const CheckedBlock&) const = default;
};

struct ManifestFile {
  Section section = Section::Model;
  uint64_t bytes = 0;
  uint64_t header_hash = 0;  // of the file's length field and header
  std::map<std::string, std::vector<CheckedBlock>> tensors;
  bool operator==(const ManifestFile&) const = default;
};

struct Manifest {
  std::map<std::string, ManifestFile> files;
  std::map<Section, Values> values;
  bool operator==(const Manifest&) const = default;
};

std::string format_manifest(const Manifest& manifest);  // ValueError for text that is not UTF-8
/// Parses and validates. Throws CheckpointError that names `file` for text that is not JSON, damaged or of a later
/// version, or that names a file outside the folder.
Manifest parse_manifest(std::string_view text, const std::string& file);

/// Formats the index of a Hugging Face folder, which maps tensors to files.
std::string format_index(const std::map<std::string, std::string>& weight_map, uint64_t total_bytes);
/// Parses and validates. Throws CheckpointError that names `file` for text that is not an index, or names a file
/// outside the folder.
std::map<std::string, std::string> parse_index(std::string_view text, const std::string& file);

uint64_t hash_bytes(const void* data, size_t bytes);  // XXH3, 64 bits

std::string format_values(const std::map<Section, Values>& values);  // exact JSON, also sent between ranks
std::map<Section, Values> parse_values(std::string_view text, const std::string& file);

/// Parses the offsets of shards, by key, that PyTorch's distributed checkpoint adds to a file's metadata. Throws
/// CheckpointError that names `file`.
std::map<std::string, Sizes> parse_sharding_info(std::string_view text, const std::string& file);

}  // namespace tessera::dcp
