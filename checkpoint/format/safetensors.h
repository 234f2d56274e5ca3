#pragma once
// Parses and formats the header of a safetensors file. Pure functions on values: no files, no tensors.
//
//   8 bytes     length N of the header, little endian
//   N bytes     {"__metadata__": {"format": "pt"},
//                "weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
//   the rest    row-major, little-endian data without gaps; offsets count from here
//
// Headers are untrusted: their length bounds allocations and nesting, and tensors must fill the data exactly. Accepts
// the same files as the reference implementation. A tensor of unknown dtype does not make a file invalid.
// Format: https://github.com/huggingface/safetensors#format.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/shard_slice.h"

namespace tessera::dcp {

inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // like the reference implementation
inline constexpr uint64_t kLengthBytes = 8;

struct SafetensorsEntry {
  std::string key;
  c10::ScalarType dtype = c10::ScalarType::Float;
  Sizes sizes = {};
  uint64_t begin = 0;  // byte range in the data
  uint64_t end = 0;
  std::string unknown_dtype = {};  // name of a dtype that is not supported; `dtype` is then unspecified
  bool operator==(const SafetensorsEntry&) const = default;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // by offset
  std::map<std::string, std::string> metadata;
  bool operator==(const SafetensorsHeader&) const = default;
};

inline int64_t item_bytes(c10::ScalarType dtype) {  // bytes per element
  return static_cast<int64_t>(c10::elementSize(dtype));
}

std::string safetensors_dtype(c10::ScalarType dtype);  // "F32" for float32; NotImplementedError if the format lacks it
std::optional<c10::ScalarType> parse_safetensors_dtype(std::string_view name);  // none for an unknown name

/// Returns the header's length. Throws CheckpointError that names `file` if a file of this size cannot have it.
uint64_t parse_header_length(std::string_view first_bytes, uint64_t file_bytes, const std::string& file);

/// Parses a header without its length. `data_bytes` is the size of the rest of the file. Throws CheckpointError that
/// names file and key.
SafetensorsHeader parse_safetensors_header(std::string_view text, uint64_t data_bytes, const std::string& file);

/// Returns length and header, padded to a multiple of 64 bytes. Entries must be sorted by offset and without gaps.
/// Throws ValueError for a key that is not UTF-8.
std::string format_safetensors_header(const SafetensorsHeader& header);

}  // namespace tessera::dcp
