#pragma once
// Computes a thread's part of the norm of many tensors in one pass. For the CPU and the GPU.
//
// Tensors are split into tiles of kTileNumel elements, numbered through a table. A thread block takes every gridDim-th
// tile, combines its threads' sums in a fixed tree, and a last kernel combines the blocks' sums likewise. Results
// depend only on sizes, values and alignment.

#include <cmath>
#include <cstdint>

#include "cuda/strided_copy.h"

namespace tessera::cuda {

enum class NormKind { L1, L2, Inf };

struct NormTable {
  static constexpr int kMaxTensors = 160;

  int32_t count = 0;
  int64_t first_tile[kMaxTensors + 1] = {};
  int64_t numel[kMaxTensors] = {};
  const void* data[kMaxTensors] = {};

  bool full() const { return count == kMaxTensors; }
  int64_t tiles() const { return first_tile[count]; }
  /// Adds a tensor. Must not be called if full().
  void add(const void* address, int64_t size) {
    data[count] = address;
    numel[count] = size;
    first_tile[count + 1] = first_tile[count] + ceil_div(size, kTileNumel);
    ++count;
  }
};
static_assert(sizeof(NormTable) <= 4000, "with the kernel's other arguments");

/// Combines two partial results; NaN stays NaN.
template <NormKind kKind, typename Sum>
TESSERA_HOST_DEVICE Sum combine(Sum a, Sum b) {
  if constexpr (kKind == NormKind::Inf) {
    return a != a || a > b ? a : b;
  } else {
    return a + b;
  }
}

template <NormKind kKind, typename Sum>
TESSERA_HOST_DEVICE Sum contribution(Sum value) {
  if constexpr (kKind == NormKind::L2) {
    return value * value;
  } else {
    return value < 0 ? -value : value;
  }
}

/// Returns the partial result of thread `thread` of `threads` over tile `tile`.
template <typename T, typename Sum, NormKind kKind>
TESSERA_HOST_DEVICE Sum norm_of_tile(const NormTable& table, int64_t tile, int thread, int threads) {
  constexpr int kWide = kAccessBytes / static_cast<int>(sizeof(T));
  const int owner = find_owner(table.first_tile, table.count, tile);
  const int64_t begin = (tile - table.first_tile[owner]) * kTileNumel, rest = table.numel[owner] - begin;
  const int count = static_cast<int>(rest < kTileNumel ? rest : kTileNumel);
  const T* const data = static_cast<const T*>(table.data[owner]) + begin;
  const int accesses = reinterpret_cast<uintptr_t>(data) % kAccessBytes == 0 ? count / kWide : 0;
  Sum sum = 0;
  for (int access = thread; access < accesses; access += threads) {
    const auto pack = reinterpret_cast<const Pack<T, kWide>*>(data)[access];
    for (int i = 0; i < kWide; ++i) {
      sum = combine<kKind>(sum, contribution<kKind>(static_cast<Sum>(pack.items[i])));
    }
  }
  for (int i = accesses * kWide + thread; i < count; i += threads) {
    sum = combine<kKind>(sum, contribution<kKind>(static_cast<Sum>(data[i])));
  }
  return sum;
}

/// Returns the partial result of thread `thread` over the results of all blocks.
template <typename Sum, NormKind kKind>
TESSERA_HOST_DEVICE Sum norm_of_partials(const Sum* partials, int64_t count, int thread, int threads) {
  Sum sum = 0;
  for (int64_t i = thread; i < count; i += threads) {
    sum = combine<kKind>(sum, partials[i]);
  }
  return sum;
}

/// Performs one step of the tree over a block's sums, of which 2 * half remain. Threads below `half` call it, and all
/// threads synchronize before the next step.
template <NormKind kKind, typename Sum>
TESSERA_HOST_DEVICE void combine_step(Sum* sums, int half, int thread) {
  if (thread < half) {
    sums[thread] = combine<kKind>(sums[thread], sums[thread + half]);
  }
}

}  // namespace tessera::cuda
