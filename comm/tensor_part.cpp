#include "comm/tensor_part.h"

#include <algorithm>
#include <cstring>

#include "comm/stream_copy.h"

namespace tessera {

namespace {

/// What a range and a part have in common: `bytes` from `at` on in the range, of which the tensor has the first
/// `present`, at `data`.
struct Overlap {
  int64_t at;
  int64_t bytes;
  char* data;
  int64_t present;
};

Overlap overlap_of(const TensorPart& part, const PartRange& range) {
  const int64_t part_begin = part.offset * range.item, part_bytes = part.numel * range.item;
  const int64_t begin = std::max(range.begin, part_begin);
  const int64_t bytes = std::min(range.begin + range.bytes, part_begin + part_bytes) - begin;
  if (bytes <= 0) {
    return {begin - range.begin, 0, nullptr, 0};
  }
  const int64_t place = range.rank * part_bytes + begin - part_begin;
  const int64_t size = part.tensor.defined() ? static_cast<int64_t>(part.tensor.nbytes()) : 0;
  const int64_t present = std::clamp<int64_t>(size - place, 0, bytes);
  char* const data = present > 0 ? static_cast<char*>(part.tensor.mutable_data_ptr()) + place : nullptr;
  return {begin - range.begin, bytes, data, present};
}

}  // namespace

void read_parts(const std::vector<TensorPart>& parts, const PartRange& range, char* to, int64_t stream_from) {
  int64_t filled = 0;
  for (const auto& part : parts) {
    const auto [at, bytes, data, present] = overlap_of(part, range);
    if (present > 0) {
      std::memset(to + filled, 0, static_cast<size_t>(at - filled));
      copy_bytes(to + at, data, present, stream_from);
      filled = at + present;
    }
  }
  std::memset(to + filled, 0, static_cast<size_t>(range.bytes - filled));
}

void write_parts(const std::vector<TensorPart>& parts, const PartRange& range, const char* from, int64_t stream_from) {
  for (const auto& part : parts) {
    const auto [at, bytes, data, present] = overlap_of(part, range);
    if (present > 0) {
      copy_bytes(data, from + at, present, stream_from);
    }
  }
}

const char* find_in_parts(const std::vector<TensorPart>& parts, const PartRange& range) {
  for (const auto& part : parts) {
    const auto [at, bytes, data, present] = overlap_of(part, range);
    if (present == range.bytes) {
      return data;
    }
  }
  return nullptr;
}

}  // namespace tessera
