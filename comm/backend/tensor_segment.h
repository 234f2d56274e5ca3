#pragma once
// A collective's flat side in parts: tensors of their own in place of one contiguous buffer of all ranks, so that
// nothing has to be copied into that buffer or out of it.
//
// Example, 2 ranks that gather flat shards of 4 elements, of which the first 3 are rows of a weight and the last is one
// of a bias:
//   {.offset = 0, .numel = 3, .tensor = weight}   rank 0's elements 0 to 2 → weight[0..2], rank 1's → weight[3..5]
//   {.offset = 3, .numel = 1, .tensor = bias}     rank 0's element 3 → bias[0], rank 1's → bias[1]

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace tessera {

/// Elements [offset, offset + numel) of each rank's flat elements are elements [r * numel, (r + 1) * numel) of `tensor`
/// for rank r. The tensor, dense and contiguous, may lack the last ones, as uneven shards do: they are read as zeros,
/// and not written. An undefined one lacks all.
struct TensorSegment {
  int64_t offset = 0;
  int64_t numel = 0;
  at::Tensor tensor = {};
};

/// In the order of their offsets, without overlap. What lies between parts is read as zeros, and not written.
/// Shared, since a collective in flight holds them.
using TensorSegments = std::shared_ptr<const std::vector<TensorSegment>>;

/// Of the first tensor; null where there is none.
std::optional<at::ScalarType> dtype_of(const std::vector<TensorSegment>& parts);

/// Bytes [begin, begin + bytes) of what belongs to rank `rank`, of elements of `dtype`.
struct PartRange {
  at::ScalarType dtype = at::kByte;
  int64_t rank = 0;
  int64_t begin = 0;
  int64_t bytes = 0;
};

/// Copies them to `to`, and from `from`: pieces of at least `stream_from` bytes past the cache (stream_copy.h). Parts
/// that are written, all of one dtype, may have another than the range: then elements are cast, as Tensor::to does.
void read_segments(const std::vector<TensorSegment>& parts, const PartRange& range, char* to, int64_t stream_from);
void write_segments(const std::vector<TensorSegment>& parts, const PartRange& range, const char* from,
                    int64_t stream_from);

/// Where a range lies.
struct PlaceInPart {
  const at::Tensor* tensor = nullptr;
  const char* data = nullptr;
};
/// Nulls unless the range lies in one tensor and is all there.
PlaceInPart find_in_parts(const std::vector<TensorSegment>& parts, const PartRange& range);

}  // namespace tessera
