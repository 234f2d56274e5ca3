#include "comm/backend/tensor_segment.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "comm/backend/stream_copy.h"

namespace tessera {

namespace {

/// Overlap of a range with a segment: `bytes` from `at` on in the range. The tensor contains the first `present` of
/// them, at `data`.
struct Overlap {
  int64_t at;
  int64_t bytes;
  char* data;
  int64_t present;
};

int64_t item_bytes(at::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

Overlap find_overlap(const TensorSegment& part, const PartRange& range) {
  const int64_t item = item_bytes(range.dtype);
  const int64_t part_begin = part.offset * item, part_bytes = part.numel * item;
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

/// Returns the segments, which are sorted, that may overlap the range. A call visits ranges of all its segments.
std::span<const TensorSegment> parts_at(const std::vector<TensorSegment>& parts, const PartRange& range) {
  const int64_t item = item_bytes(range.dtype), end = range.begin + range.bytes;
  const auto first = std::ranges::partition_point(
      parts, [&](const TensorSegment& part) { return (part.offset + part.numel) * item <= range.begin; });
  const auto last =
      std::partition_point(first, parts.end(), [&](const TensorSegment& part) { return part.offset * item < end; });
  return {first, last};
}

void write_same(const std::vector<TensorSegment>& parts, const PartRange& range, const char* from,
                int64_t stream_from) {
  for (const auto& part : parts_at(parts, range)) {
    const auto [at, bytes, data, present] = find_overlap(part, range);
    if (present > 0) {
      copy_bytes(data, from + at, present, stream_from);
    }
  }
}

/// Casts with ATen's kernel, which is vectorized for every pair of dtypes.
void cast(char* to, at::ScalarType to_dtype, const char* from, at::ScalarType from_dtype, int64_t numel) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto source = at::from_blob(const_cast<char*>(from), {numel}, from_dtype);
  at::from_blob(to, {numel}, to_dtype).copy_(source);
}

/// Casts through a buffer that stays in the L2 cache, so that the cast causes no memory traffic.
void write_cast(const std::vector<TensorSegment>& parts, at::ScalarType dtype, const PartRange& range, const char* from,
                int64_t stream_from) {
  alignas(64) std::array<char, size_t{64} * 1024> buffer;
  const int64_t from_item = item_bytes(range.dtype), item = item_bytes(dtype);
  const int64_t numel = range.bytes / from_item, room = static_cast<int64_t>(buffer.size()) / item;
  for (int64_t begin = 0; begin < numel; begin += room) {
    const int64_t count = std::min(room, numel - begin);
    cast(buffer.data(), dtype, from + begin * from_item, range.dtype, count);
    const PartRange piece{
        .dtype = dtype, .rank = range.rank, .begin = (range.begin / from_item + begin) * item, .bytes = count * item};
    write_same(parts, piece, buffer.data(), stream_from);
  }
}

}  // namespace

std::optional<at::ScalarType> segments_dtype(const std::vector<TensorSegment>& parts) {
  for (const auto& part : parts) {
    if (part.tensor.defined()) {
      return part.tensor.scalar_type();
    }
  }
  return std::nullopt;
}

void read_segments(const std::vector<TensorSegment>& parts, const PartRange& range, char* to, int64_t stream_from) {
  int64_t filled = 0;
  for (const auto& part : parts_at(parts, range)) {
    const auto [at, bytes, data, present] = find_overlap(part, range);
    if (present > 0) {
      std::memset(to + filled, 0, static_cast<size_t>(at - filled));
      copy_bytes(to + at, data, present, stream_from);
      filled = at + present;
    }
  }
  std::memset(to + filled, 0, static_cast<size_t>(range.bytes - filled));
}

void write_segments(const std::vector<TensorSegment>& parts, const PartRange& range, const char* from,
                    int64_t stream_from) {
  const auto dtype = segments_dtype(parts);
  if (dtype && *dtype != range.dtype) {
    write_cast(parts, *dtype, range, from, stream_from);
  } else {
    write_same(parts, range, from, stream_from);
  }
}

PlaceInPart find_in_parts(const std::vector<TensorSegment>& parts, const PartRange& range) {
  for (const auto& part : parts_at(parts, range)) {
    const auto [at, bytes, data, present] = find_overlap(part, range);
    if (present == range.bytes) {
      return {.tensor = &part.tensor, .data = data};
    }
  }
  return {};
}

}  // namespace tessera
