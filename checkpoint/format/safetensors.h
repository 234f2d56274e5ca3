#pragma once
// The header of a safetensors file: text in, integers out, and back. No files, no tensors.
//
//   8 bytes     length N of the header, little endian
//   N bytes     {"__metadata__": {"format": "pt"},
//                "weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
//   the rest    the tensors' row-major, little-endian bytes without gaps; offsets count from here
//
// A header comes from anywhere and is believed in nothing: what it allocates is bounded by its length (at most 100 MB,
// as in the reference implementation), it nests no deeper than it must, and its tensors fill the file's data exactly.
// What the reference implementation accepts is accepted: null for the metadata, further fields of a tensor, an empty
// name. A tensor of a dtype that we do not know is no fault of the file: others in it can be read.
//
// The format: https://github.com/huggingface/safetensors#format. Thread safety: values.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/box.h"

namespace tessera::dcp {

inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;
inline constexpr uint64_t kLengthBytes = 8;

struct SafetensorsEntry {
  std::string key;
  c10::ScalarType dtype = c10::ScalarType::Float;
  Sizes sizes = {};
  uint64_t begin = 0;  // of the data, in bytes
  uint64_t end = 0;
  std::string unknown_dtype = {};  // a name that we do not know; `dtype` says nothing then
  bool operator==(const SafetensorsEntry&) const = default;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in order of their bytes
  std::map<std::string, std::string> metadata;
  bool operator==(const SafetensorsHeader&) const = default;
};

/// Bytes of one element.
inline int64_t item_bytes(c10::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

/// "F32" for float32. Throws NotImplementedError for a dtype that the format lacks.
std::string safetensors_dtype(c10::ScalarType dtype);
/// None for a name that we do not know.
std::optional<c10::ScalarType> parse_safetensors_dtype(std::string_view name);

/// The header's length from the file's first 8 bytes. Throws CheckpointError that names `file` if a file of
/// `file_bytes` cannot have such a header.
uint64_t parse_header_length(std::string_view first_bytes, uint64_t file_bytes, const std::string& file);

/// `text`: the header without its length; `data_bytes`: how much follows it. Throws CheckpointError that names `file`,
/// and the key where there is one.
SafetensorsHeader parse_safetensors_header(std::string_view text, uint64_t data_bytes, const std::string& file);

/// The file's first bytes: length and header, padded with blanks so that the data are aligned to 64 bytes. Entries need
/// to be as parse_safetensors_header returns them. Throws ValueError for a key that is not UTF-8.
std::string format_safetensors_header(const SafetensorsHeader& header);

}  // namespace tessera::dcp
