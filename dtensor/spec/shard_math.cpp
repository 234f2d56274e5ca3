#include "dtensor/spec/shard_math.h"

#include <algorithm>

namespace tessera {

DimRange chunk_range(int64_t size, int64_t num_chunks, int64_t index) {
  const int64_t length = chunk_length(size, num_chunks);
  const int64_t begin = std::min(index * length, size);
  return {.offset = begin, .length = std::min(begin + length, size) - begin};
}

DimRange local_range(int64_t size, int64_t dim, const Placements& placements, const MeshPosition& position) {
  DimRange range{.offset = 0, .length = size};
  for (const size_t axis : shard_order(placements)) {
    if (placements[axis].is_shard(dim)) {
      const auto piece = chunk_range(range.length, position.axis_sizes[axis], position.coordinate[axis]);
      range = {.offset = range.offset + piece.offset, .length = piece.length};
    }
  }
  return range;
}

DimVector local_sizes(at::IntArrayRef sizes, const Placements& placements, const MeshPosition& position) {
  DimVector result(sizes.begin(), sizes.end());
  for (const size_t axis : shard_order(placements)) {
    auto& length = result[static_cast<size_t>(placements[axis].dim())];
    length = chunk_range(length, position.axis_sizes[axis], position.coordinate[axis]).length;
  }
  return result;
}

bool is_empty(at::IntArrayRef sizes) {
  return std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
}

}  // namespace tessera
