#include "cuda/draw_table.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace tessera::cuda {

namespace {

constexpr int64_t kBlock = 256;  // threads of a block, as ATen launches them

/// Threads that fill a piece.
int64_t num_threads(int64_t numel, const GpuSize& gpu) {
  return kBlock * std::min(gpu.multiprocessors * (gpu.threads_each / kBlock), ceil_div(numel, kBlock));
}

/// By how much filling it moves the generator's offset.
uint64_t counter_offset(int64_t numel, const GpuSize& gpu, const DrawSource& source) {
  return static_cast<uint64_t>(ceil_div(numel, num_threads(numel, gpu) * source.width)) * kOffsetsADraw;
}

bool is_addressed_by_32_bits(int64_t numel, int64_t item_bytes) {
  return numel <= std::numeric_limits<int32_t>::max() &&
         1 + (numel - 1) * item_bytes <= std::numeric_limits<int32_t>::max();
}

void append_pieces(DrawPiece piece, int64_t item_bytes, std::vector<DrawPiece>& pieces) {
  if (is_addressed_by_32_bits(piece.numel, item_bytes)) {
    pieces.push_back(piece);
    return;
  }
  const int64_t half = piece.numel / 2;
  append_pieces({piece.begin, half}, item_bytes, pieces);
  append_pieces({piece.begin + half, piece.numel - half}, item_bytes, pieces);
}

/// The generator's offset where each piece begins, and after the last one. A whole tensor of several pieces is counted
/// once more before them.
std::vector<uint64_t> piece_offsets(const std::vector<DrawPiece>& pieces, int64_t whole_numel, const GpuSize& gpu,
                                    const DrawSource& source) {
  std::vector<uint64_t> offsets = {source.offset + (pieces.size() == 1 ? 0 : counter_offset(whole_numel, gpu, source))};
  for (const DrawPiece& piece : pieces) {
    offsets.push_back(offsets.back() + counter_offset(piece.numel, gpu, source));
  }
  return offsets;
}

bool set_pieces(DrawTable& table, int64_t whole_numel, const GpuSize& gpu, const DrawSource& source) {
  const auto pieces = draw_pieces(whole_numel, source.item_bytes);
  if (pieces.size() > DrawTable::kMaxPieces) {
    return false;
  }
  table.pieces = static_cast<int32_t>(pieces.size());
  table.width = source.width;
  table.threads = num_threads(pieces[0].numel, gpu);  // of all: where there are several, each has the largest grid
  const auto offsets = piece_offsets(pieces, whole_numel, gpu, source);
  for (size_t i = 0; i < pieces.size(); ++i) {
    table.first_element[i] = pieces[i].begin;
    table.offset[i] = offsets[i];
  }
  table.first_element[pieces.size()] = whole_numel;
  return true;
}

/// Dims of more than one element, the fastest in the shard's memory last, so that neighbouring threads write
/// neighbours.
std::vector<size_t> ordered_dims(const ShardOfWhole& shard) {
  std::vector<size_t> dims;
  for (size_t dim = 0; dim < shard.sizes.size(); ++dim) {
    if (shard.sizes[dim] != 1) {
      dims.push_back(dim);
    }
  }
  std::stable_sort(dims.begin(), dims.end(),
                   [&](size_t a, size_t b) { return shard.local_strides[a] > shard.local_strides[b]; });
  return dims;
}

/// Dims that follow each other in both memories become one.
bool set_dims(DrawTable& table, const ShardOfWhole& shard) {
  for (const size_t dim : ordered_dims(shard)) {
    const int64_t size = shard.sizes[dim], whole = shard.whole_strides[dim], local = shard.local_strides[dim];
    const int32_t last = table.dims - 1;
    if (last >= 0 && table.whole_strides[last] == size * whole && table.local_strides[last] == size * local) {
      table.sizes[last] *= size;
      table.whole_strides[last] = whole;
      table.local_strides[last] = local;
      continue;
    }
    if (table.dims == DrawTable::kMaxDims) {
      return false;
    }
    table.sizes[table.dims] = size;
    table.whole_strides[table.dims] = whole;
    table.local_strides[table.dims++] = local;
  }
  return true;
}

}  // namespace

std::vector<DrawPiece> draw_pieces(int64_t numel, int64_t item_bytes) {
  std::vector<DrawPiece> pieces;
  append_pieces({0, numel}, item_bytes, pieces);
  return pieces;
}

std::optional<DrawTable> draw_table(const ShardOfWhole& shard, const GpuSize& gpu, const DrawSource& source) {
  DrawTable table;
  table.seed = source.seed;
  table.whole_offset = shard.whole_offset;
  table.numel = std::accumulate(shard.sizes.begin(), shard.sizes.end(), int64_t{1}, std::multiplies<>());
  if (table.numel == 0) {
    return table;
  }
  if (!set_dims(table, shard) || !set_pieces(table, shard.whole_numel, gpu, source)) {
    return std::nullopt;
  }
  return table;
}

uint64_t offset_after(int64_t whole_numel, const GpuSize& gpu, const DrawSource& source) {
  if (whole_numel == 0) {
    return source.offset;
  }
  return piece_offsets(draw_pieces(whole_numel, source.item_bytes), whole_numel, gpu, source).back();
}

}  // namespace tessera::cuda
