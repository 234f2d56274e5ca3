#pragma once
// Separate tensors in place of a collective's contiguous buffer of all ranks, so that nothing is copied in or out.
//
// Example of 2 ranks that gather flat shards of 4 elements, 3 of a weight and 1 of a bias:
//   {.offset = 0, .numel = 3, .tensor = weight}   rank 0's elements 0 to 2 → weight[0..2], rank 1's → weight[3..5]
//   {.offset = 3, .numel = 1, .tensor = bias}     rank 0's element 3 → bias[0], rank 1's → bias[1]

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace tessera {

/// Maps elements [offset, offset + numel) of rank r to elements [r * numel, (r + 1) * numel) of `tensor`. It is dense
/// and contiguous. Missing elements at its end, as with uneven shards, or an undefined tensor, are read as zeros and
/// not written.
struct TensorSegment {
  int64_t offset = 0;
  int64_t numel = 0;
  at::Tensor tensor = {};
};

/// Segments in order of offset, without overlap. Gaps are read as zeros and not written. Shared, since a collective in
/// flight holds them.
using TensorSegments = std::shared_ptr<const std::vector<TensorSegment>>;

/// Returns the dtype of the first tensor, or nothing.
std::optional<at::ScalarType> segments_dtype(const std::vector<TensorSegment>& parts);

/// Bytes [begin, begin + bytes) of the elements of rank `rank`, as `dtype`.
struct PartRange {
  at::ScalarType dtype = at::kByte;
  int64_t rank = 0;
  int64_t begin = 0;
  int64_t bytes = 0;
};

/// Copies a range out of, or into, the segments. Copies of at least `stream_from` bytes bypass the cache
/// (stream_copy.h). Writing casts like Tensor::to if the segments' dtype differs.
void read_segments(const std::vector<TensorSegment>& parts, const PartRange& range, char* to, int64_t stream_from);
void write_segments(const std::vector<TensorSegment>& parts, const PartRange& range, const char* from,
                    int64_t stream_from);

/// Location of a range.
struct PlaceInPart {
  const at::Tensor* tensor = nullptr;
  const char* data = nullptr;
};
/// Returns nulls unless the range is completely within one tensor.
PlaceInPart find_in_parts(const std::vector<TensorSegment>& parts, const PartRange& range);

}  // namespace tessera
