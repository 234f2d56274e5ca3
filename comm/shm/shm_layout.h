#pragma once
// Layout of the memory that ranks of an "shm" group share. Integers only.
//
// Each rank has a control block and a ring of slots. It fills slot step % kSlots in each of the group's steps, and the
// others read it. So a rank may be up to kSlots steps ahead of the slowest reader.
//
//   | failure record | control, rank 0 | control, rank 1 | ... | slots of rank 0 | slots of rank 1 | ...
//   a slot: | header: the rank's call | payload |
//
// Messages of each ordered pair have a layout of 2 ranks, sender first, behind all that, so that a pair's first message
// needs no negotiation. These parts of the file are mapped on demand, and only written pages use memory: 17 GB of file
// for 64 ranks cost nothing. (With separate memory per pair, the receiver would depend on a file of the sender that it
// has yet to open.)
//
//   | the above | messages 0 to 0, unused | 0 to 1 | ... | 1 to 0 | ...

#include <algorithm>
#include <cstdint>

namespace tessera {

struct ShmLayout {
  /// Payload of a slot, and slots per rank. Messages are split into pieces that stay in the cache between writer and
  /// readers, and the ring absorbs jitter. With 2 ranks that gather 16 MiB each, 64 KiB to 512 KiB and 4 to 16 slots
  /// perform equally; fewer or smaller slots are slower, and more exceed the cache.
  static constexpr int64_t kSlotBytes = int64_t{256} * 1024;
  static constexpr int64_t kSlots = 8;
  static constexpr int64_t kFailureBytes = 1024;
  static constexpr int64_t kControlBytes = 512;
  static constexpr int64_t kPage = 4096;
  static constexpr int64_t kAlignment = 64;
  /// Size of a SharedPlace.
  static constexpr int64_t kPlaceBytes = 32;
  /// Alignment of separately mapped parts: the largest page of any system.
  static constexpr int64_t kMapAlignment = int64_t{64} * 1024;

  int64_t ranks = 1;

  static constexpr int64_t round_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
  }

  /// Size of a slot's header and, per rank, an all_to_all's splits or the location of a reduce_scatter's piece.
  constexpr int64_t header_bytes() const { return round_up(kAlignment + ranks * kPlaceBytes, kAlignment); }
  /// Includes more than the payload's pages, so that equal offsets of slots do not collide in the cache.
  constexpr int64_t slot_stride() const { return round_up(header_bytes() + kSlotBytes, kPage); }
  constexpr int64_t control_offset(int64_t rank) const { return kFailureBytes + rank * kControlBytes; }
  constexpr int64_t slot_offset(int64_t rank, uint64_t step) const {
    return round_up(control_offset(ranks), kPage) +
           (rank * kSlots + static_cast<int64_t>(step % kSlots)) * slot_stride();
  }
  constexpr int64_t total_bytes() const { return slot_offset(ranks, 0); }  // without messages

  static constexpr ShmLayout of_messages();
  constexpr int64_t messages_offset(int64_t from, int64_t to) const {
    return round_up(total_bytes(), kMapAlignment) +
           (from * ranks + to) * round_up(of_messages().total_bytes(), kMapAlignment);
  }
  constexpr int64_t file_bytes() const { return messages_offset(ranks, 0); }

  /// Payload per rank if a slot has a different part for each rank.
  constexpr int64_t part_bytes() const { return std::max(kAlignment, kSlotBytes / ranks / kAlignment * kAlignment); }
};

constexpr ShmLayout ShmLayout::of_messages() {
  return {.ranks = 2};
}

/// Largest number of ranks, for which part_bytes() per rank fits into a slot.
constexpr int64_t kShmMaxRanks = ShmLayout::kSlotBytes / ShmLayout::kAlignment;

}  // namespace tessera
