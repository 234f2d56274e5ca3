// Moves a step's pieces, by slots or in place. shm_queue.cpp chooses the next step.

#include <algorithm>
#include <atomic>
#include <utility>

#include "comm/backend/local_reduce.h"
#include "comm/backend/stream_copy.h"
#include "comm/shm/shm_queue.h"
#include "comm/shm/slot_header.h"

namespace tessera {

namespace {

// A slot's cache lines are in the cache of the core that read it last. Taking them over one by one is ten times as slow
// as bypassing the cache, except for a few lines.
constexpr int64_t kStreamSlotBytes = 1024;
// Smaller pieces of a reduce_scatter always use the slot, so that small calls need no lookup.
constexpr int64_t kZeroCopyPieceBytes = int64_t{16} * 1024;

/// Returns the range of rank `rank` in the numbering of segments; `range` and `piece` are as in a tensor of all ranks.
PartRange piece_range(const CollectiveSignature& shape, int rank, const ByteRange& range, const ByteRange& piece) {
  return {.dtype = shape.dtype, .rank = rank, .begin = piece.begin - range.begin, .bytes = piece.bytes};
}

/// Returns whether a piece's slot has the location of the piece. Known to its sender and receiver.
bool has_piece_place(const CollectiveSignature& shape, const ByteRange& piece) {
  return shape.kind == Collective::ReduceScatter && piece.bytes >= kZeroCopyPieceBytes;
}

std::optional<SharedPlace> find_shared_place(const PlaceInPart& found) {
  auto place = found.tensor != nullptr ? shared_place(*found.tensor) : std::nullopt;
  if (place) {
    place->offset += found.data - static_cast<const char*>(found.tensor->const_data_ptr());
  }
  return place;
}

}  // namespace

void ShmQueue::put_pieces(Operation& operation, const ShmPhase& phase) {
  const int parts = operation.exposed ? 0 : phase.own_segments ? ranks_ : 1;
  for (int to = 0; to < parts; ++to) {
    put_piece(operation, phase, to);
  }
  if (!phase.reduces) {
    put_own(operation, phase);
  }
}

// Also sends this rank's own piece if it spans several tensors of segments, because own_piece() needs one tensor.
void ShmQueue::put_piece(Operation& operation, const ShmPhase& phase, int to) {
  const char* const source = phase.from_output ? operation.output : operation.input;
  const ByteRange piece = phase.sent[to].piece(put_cursor_.step, phase.chunk);
  const PartRange range = piece_range(operation.shape, to, phase.sent[to], piece);
  const bool are_segments = source == nullptr && operation.call.parts;
  const PlaceInPart found = are_segments ? find_in_parts(*operation.call.parts, range) : PlaceInPart{};
  if (phase.own_segments && to == rank_ && (!are_segments || found.data != nullptr)) {
    return;
  }
  if (has_piece_place(operation.shape, piece)) {
    const auto place = find_shared_place(found);
    write_piece_place(arena_.slot(rank_, progress_.posted()), to, place);
    operation.exposes_pieces = operation.exposes_pieces || place;
    if (place) {
      return;
    }
  }
  char* const payload = arena_.payload(rank_, progress_.posted()) + to * phase.chunk;
  if (are_segments) {
    read_segments(*operation.call.parts, range, payload, kStreamSlotBytes);
  } else {
    copy_bytes(payload, source + piece.begin, piece.bytes, kStreamSlotBytes);
  }
}

// Copies this rank's data for itself directly to its destination.
void ShmQueue::put_own(const Operation& operation, const ShmPhase& phase) {
  const char* const source = phase.from_output ? operation.output : operation.input;
  const ByteRange from = phase.sent_to(rank_).piece(put_cursor_.step, phase.chunk);
  const ByteRange to = phase.received[rank_].piece(put_cursor_.step, phase.chunk);
  if (operation.call.parts) {
    write_segments(*operation.call.parts, piece_range(operation.shape, rank_, phase.received[rank_], to),
                   source + from.begin, operation.stream_from);
  } else {
    copy_bytes(operation.output + to.begin, source + from.begin, std::min(from.bytes, to.bytes), operation.stream_from);
  }
}

/// Finds the inputs that peers exposed.
bool ShmQueue::find_exposed_inputs(Operation& operation) {
  for (int peer = 0; peer < ranks_; ++peer) {
    const auto place = peer == rank_ ? std::nullopt : read_exposed(arena_.slot(peer, progress_.taken()));
    if (!place) {
      continue;
    }
    operation.exposed_inputs.resize(ranks_);
    try {
      operation.exposed_inputs[peer] = {place, peer_memory_[peer].find(*place)};
    } catch (const CommError& failure) {
      fault_ = failure.what();
    }
  }
  return fault_.empty();
}

/// Returns whether the data was still valid when it was read. An owner with an error, such as a timeout, may overwrite
/// its input after it has recorded a failure.
bool ShmQueue::check_zero_copy_reads() {
  if (zero_copy_reads_.empty()) {
    return fault_.empty();
  }
  for (const auto& [peer, place] : zero_copy_reads_) {
    if (!peer_memory_[peer].is_alive(place)) {
      fault_ = "a peer has ended the group before its input was read";
    }
  }
  std::atomic_thread_fence(std::memory_order_acquire);  // orders the reads before the check
  if (fault_.empty() && arena_.has_failed()) {
    const std::string failure = arena_.failure();
    fault_ = failure.empty() ? "a rank has failed before all inputs were read" : failure;
  }
  return fault_.empty();
}

void ShmQueue::take_pieces(const Operation& operation, const ShmPhase& phase) {
  if (phase.reduces) {
    reduce_pieces(operation, phase);
    return;
  }
  const int64_t offset = phase.own_segments ? rank_ * phase.chunk : 0;
  for (int i = 1; i < ranks_; ++i) {
    const int from = (rank_ + i) % ranks_;
    const ByteRange to = phase.received[from].piece(take_cursor_.step, phase.chunk);
    const bool is_exposed = !operation.exposed_inputs.empty() && operation.exposed_inputs[from].place;
    if (is_exposed) {
      zero_copy_reads_.push_back({from, *operation.exposed_inputs[from].place});
    }
    const char* const payload = is_exposed ? operation.exposed_inputs[from].data + to.begin - phase.received[from].begin
                                           : arena_.payload(from, progress_.taken()) + offset;
    if (operation.call.parts) {
      write_segments(*operation.call.parts, piece_range(operation.shape, from, phase.received[from], to), payload,
                     operation.stream_from);
    } else {
      copy_bytes(operation.output + to.begin, payload, to.bytes, operation.stream_from);
    }
  }
}

void ShmQueue::reduce_pieces(const Operation& operation, const ShmPhase& phase) {
  const ByteRange to = phase.received[rank_].piece(take_cursor_.step, phase.chunk);
  if (to.bytes == 0) {
    return;
  }
  c10::SmallVector<const void*, 8> inputs;
  for (int from = 0; from < ranks_; ++from) {
    inputs.push_back(from == rank_ ? own_piece(operation, phase) : find_piece(operation, phase, from));
    if (inputs.back() == nullptr) {
      return;
    }
  }
  const auto numel = to.bytes / static_cast<int64_t>(c10::elementSize(operation.shape.dtype));
  reduce_in_order(operation.output + to.begin, inputs, numel, operation.shape.dtype, operation.shape.op);
}

const void* ShmQueue::own_piece(const Operation& operation, const ShmPhase& phase) const {
  const char* const source = phase.from_output ? operation.output : operation.input;
  const ByteRange piece = phase.sent_to(rank_).piece(take_cursor_.step, phase.chunk);
  if (source != nullptr) {
    return source + piece.begin;
  }
  const PartRange range = piece_range(operation.shape, rank_, phase.sent_to(rank_), piece);
  const char* const found = find_in_parts(*operation.call.parts, range).data;
  return found != nullptr ? found : arena_.payload(rank_, progress_.taken()) + rank_ * phase.chunk;
}

/// Returns null, and sets a fault, if a peer's memory cannot be read.
const void* ShmQueue::find_piece(const Operation& operation, const ShmPhase& phase, int from) {
  const ByteRange piece = phase.received[from].piece(take_cursor_.step, phase.chunk);
  const auto place = has_piece_place(operation.shape, piece)
                         ? read_piece_place(arena_.slot(from, progress_.taken()), rank_)
                         : std::nullopt;
  if (!place) {
    return arena_.payload(from, progress_.taken()) + (phase.own_segments ? rank_ * phase.chunk : 0);
  }
  zero_copy_reads_.push_back({from, *place});
  try {
    return peer_memory_[from].find(*place);
  } catch (const CommError& failure) {
    fault_ = failure.what();
    zero_copy_reads_.pop_back();
    return nullptr;
  }
}

}  // namespace tessera
