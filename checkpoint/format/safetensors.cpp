#include "checkpoint/format/safetensors.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <iterator>

#include "checkpoint/format/checkpoint_error.h"
#include "checkpoint/format/header_reader.h"
#include "checkpoint/format/json_text.h"

namespace tessera::dcp {

namespace {

using c10::ScalarType;

struct DtypeName {
  ScalarType dtype;
  const char* name;
};

constexpr std::array kDtypes = {
    DtypeName{ScalarType::Float, "F32"},
    DtypeName{ScalarType::BFloat16, "BF16"},
    DtypeName{ScalarType::Half, "F16"},
    DtypeName{ScalarType::Double, "F64"},
    DtypeName{ScalarType::Long, "I64"},
    DtypeName{ScalarType::Int, "I32"},
    DtypeName{ScalarType::Short, "I16"},
    DtypeName{ScalarType::Char, "I8"},
    DtypeName{ScalarType::Byte, "U8"},
    DtypeName{ScalarType::UInt16, "U16"},
    DtypeName{ScalarType::UInt32, "U32"},
    DtypeName{ScalarType::UInt64, "U64"},
    DtypeName{ScalarType::Bool, "BOOL"},
    DtypeName{ScalarType::Float8_e4m3fn, "F8_E4M3"},
    DtypeName{ScalarType::Float8_e5m2, "F8_E5M2"},
    DtypeName{ScalarType::ComplexFloat, "C64"},
};

/// Returns the number of bytes of a tensor, or of elements if the dtype is unknown; nullopt on overflow of 64 bits.
std::optional<uint64_t> byte_count(const SafetensorsEntry& entry) {
  uint64_t bytes = entry.unknown_dtype.empty() ? c10::elementSize(entry.dtype) : 1;
  for (const int64_t size : entry.sizes) {
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes) || bytes > INT64_MAX) {
      return std::nullopt;
    }
  }
  return bytes;
}

void check_bytes(const SafetensorsEntry& entry, const std::string& file) {
  const auto bytes = byte_count(entry);
  // For an unknown dtype, an element has at least one bit.
  const bool fits =
      bytes && entry.end >= entry.begin &&
      (entry.unknown_dtype.empty() ? entry.end - entry.begin == *bytes : entry.end - entry.begin >= *bytes / 8);
  TESSERA_CHECK(CheckpointError, fits,
                "{}: tensor '{}' has {} bytes of data (data_offsets [{}, {}]), but its shape and dtype make {}", file,
                entry.key, entry.end - entry.begin, entry.begin, entry.end,
                bytes ? std::to_string(*bytes) : "more than any file has");
}

}  // namespace

std::string safetensors_dtype(ScalarType dtype) {
  for (const auto& known : kDtypes) {
    if (known.dtype == dtype) {
      return known.name;
    }
  }
  throw NotImplementedError(
      fmt::format("safetensors has no dtype {}; cast the tensor before it is saved", c10::toString(dtype)));
}

std::optional<ScalarType> parse_safetensors_dtype(std::string_view name) {
  for (const auto& known : kDtypes) {
    if (known.name == name) {
      return known.dtype;
    }
  }
  return std::nullopt;
}

uint64_t parse_header_length(std::string_view first_bytes, uint64_t file_bytes, const std::string& file) {
  TESSERA_CHECK(CheckpointError, first_bytes.size() >= kLengthBytes,
                "{}: {} bytes are no safetensors file; is it truncated?", file, file_bytes);
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;) {
    length = length << 8 | static_cast<unsigned char>(first_bytes[i]);
  }
  TESSERA_CHECK(CheckpointError, length <= kMaxHeaderBytes,
                "{}: a header of {} bytes, of at most {}; this is no safetensors file", file, length, kMaxHeaderBytes);
  TESSERA_CHECK(CheckpointError, length <= file_bytes - kLengthBytes,
                "{}: a header of {} bytes in a file of {}; the file is truncated", file, length, file_bytes);
  return length;
}

SafetensorsHeader parse_safetensors_header(std::string_view text, uint64_t data_bytes, const std::string& file) {
  SafetensorsHeader header = read_header_json(text, file);
  // Empty tensors precede the one that begins at the same offset.
  std::stable_sort(header.entries.begin(), header.entries.end(),
                   [](const auto& a, const auto& b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; });
  uint64_t filled = 0;
  for (const auto& entry : header.entries) {
    check_bytes(entry, file);
    TESSERA_CHECK(CheckpointError, entry.begin == filled,
                  "{}: tensor '{}' begins at byte {} of the data, where {} are used", file, entry.key, entry.begin,
                  filled);
    filled = entry.end;
    TESSERA_CHECK(CheckpointError, filled <= data_bytes,
                  "{}: tensor '{}' ends at byte {} of the data, but the file has {}; it is truncated", file, entry.key,
                  filled, data_bytes);
  }
  TESSERA_CHECK(CheckpointError, filled == data_bytes, "{}: {} bytes of data, of which its tensors are {}", file,
                data_bytes, filled);
  return header;
}

std::string format_safetensors_header(const SafetensorsHeader& header) {
  std::string text = "{";
  if (!header.metadata.empty()) {
    append_json_key(text, "__metadata__");
    append_json_list(text, '{', header.metadata, '}', [&](const auto& item) {
      append_json_key(text, item.first);
      append_json(text, item.second);
    });
  }
  for (const auto& entry : header.entries) {
    if (text.size() > 1) {
      text += ',';
    }
    append_json_key(text, entry.key);
    fmt::format_to(std::back_inserter(text), R"({{"dtype":"{}","shape":)", safetensors_dtype(entry.dtype));
    append_json(text, entry.sizes);
    fmt::format_to(std::back_inserter(text), R"(,"data_offsets":[{},{}]}})", entry.begin, entry.end);
  }
  text += '}';
  constexpr size_t alignment = 64;
  const size_t total = (kLengthBytes + text.size() + alignment - 1) / alignment * alignment;
  text.resize(total - kLengthBytes, ' ');
  std::string result;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    result += static_cast<char>(text.size() >> (8 * i) & 0xff);
  }
  return result + text;
}

}  // namespace tessera::dcp
