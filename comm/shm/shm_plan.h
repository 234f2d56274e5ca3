#pragma once
// Plans the movement of a collective through the slots of an "shm" group. Integers only.
//
// A call has one or two phases of a number of steps that is equal on all ranks. In step t each rank puts piece t of the
// data that it sends, up to `chunk` bytes, into its slot, and takes piece t of the data that it receives from other
// slots. With 2 ranks and slots of 8 bytes, an all_gather of 12 bytes has two steps, for bytes [0, 8) and [8, 12). A
// reduce_scatter of 2 x 8 bytes, with 4 bytes per rank in a slot, also has two.

#include <c10/util/SmallVector.h>

#include <cstdint>

#include "comm/backend/collective_call.h"
#include "comm/shm/shm_layout.h"

namespace tessera {

struct ByteRange {
  int64_t begin = 0;
  int64_t bytes = 0;

  /// Returns piece t of a range that is split into pieces of `chunk`; empty past the end.
  ByteRange piece(int64_t t, int64_t chunk) const {
    const int64_t skipped = std::min(t * chunk, bytes);
    return {begin + skipped, std::min(chunk, bytes - skipped)};
  }
};

struct ShmPhase {
  /// Slots have a part for each rank, `chunk` apart; otherwise one part for all.
  bool own_segments = false;
  /// Received pieces are reduced into one range; otherwise each has its own place.
  bool reduces = false;
  /// Sends the data that the previous phase received.
  bool after_previous = false;
  /// Sends from the output; otherwise from the input.
  bool from_output = false;
  int64_t chunk = ShmLayout::kSlotBytes;
  /// At least 1. For an all_to_all, the number that this rank needs.
  int64_t steps = 1;
  /// Range for each rank, or one for all.
  c10::SmallVector<ByteRange, 4> sent = {};
  /// Place in the output, by source rank.
  c10::SmallVector<ByteRange, 4> received = {};

  const ByteRange& sent_to(int rank) const { return sent[own_segments ? rank : 0]; }
};

struct ShmPlan {
  c10::SmallVector<ShmPhase, 1> phases = {};
  /// The number of steps is the maximum of all ranks' (all_to_all), known once their calls are.
  bool steps_by_agreement = false;
};

/// Returns the plan of `call` on `rank`. In a small all_reduce every rank reduces the whole tensor, in one phase.
/// Otherwise each reduces a part, and then they gather the parts.
ShmPlan plan_call(const CollectiveSignature& call, int rank, const ShmLayout& layout);

}  // namespace tessera
