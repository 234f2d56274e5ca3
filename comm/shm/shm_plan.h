#pragma once
// How a collective moves through the slots of an "shm" group. Integers only.
//
// A call is one phase, or two; a phase is a number of steps, the same on all ranks. In step t each rank puts piece t,
// `chunk` bytes at most, of what it sends into its slot, and takes piece t of what it receives from the others' slots.
// With 2 ranks and slots of 8 bytes, an all_gather of 12 bytes is
//   step 0: put bytes [0, 8); take the peer's to its place in the output; step 1: the same with bytes [8, 12)
// and a reduce_scatter of 2 x 8 bytes, where a slot has 4 bytes for each rank, has steps 0 and 1 too.

#include <c10/util/SmallVector.h>

#include <cstdint>

#include "comm/backend/collective_call.h"
#include "comm/shm/shm_layout.h"

namespace tessera {

struct ByteRange {
  int64_t begin = 0;
  int64_t bytes = 0;

  /// Piece t of a range that is cut into pieces of `chunk`; empty past the end.
  ByteRange piece(int64_t t, int64_t chunk) const {
    const int64_t skipped = std::min(t * chunk, bytes);
    return {begin + skipped, std::min(chunk, bytes - skipped)};
  }
};

struct ShmPhase {
  /// A slot carries a part for each rank, `chunk` apart; otherwise one part for all.
  bool own_segments = false;
  /// What comes from the ranks is reduced into one range; otherwise each has a place of its own.
  bool reduces = false;
  /// Sends what the phase before has received.
  bool after_previous = false;
  /// Whether it sends from the output; otherwise from the input.
  bool from_output = false;
  int64_t chunk = ShmLayout::kCellBytes;
  /// At least 1. For an all_to_all the most that this rank alone needs.
  int64_t steps = 1;
  /// What goes to each rank, or the one part for all.
  c10::SmallVector<ByteRange, 4> sent = {};
  /// Where it goes in the output, by the rank from which it comes.
  c10::SmallVector<ByteRange, 4> received = {};

  const ByteRange& sent_to(int rank) const { return sent[own_segments ? rank : 0]; }
};

struct ShmPlan {
  c10::SmallVector<ShmPhase, 1> phases = {};
  /// Whether the number of steps is the largest of all ranks' (all_to_all), known once their calls are.
  bool steps_by_agreement = false;
};

/// The plan of `call` on `rank`. A small all_reduce is one phase, in which every rank reduces the whole tensor;
/// otherwise each reduces a part, and then they gather the parts.
ShmPlan plan_call(const CollectiveSignature& call, int rank, const ShmLayout& layout);

}  // namespace tessera
