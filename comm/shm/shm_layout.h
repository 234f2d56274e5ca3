#pragma once
// Where things lie in the memory that the ranks of an "shm" group share. Integers only.
//
// Each rank has a control block and a ring of slots. It fills its slots in the order of the group's steps, slot
// step % kCells for a step, and the others read them. So a rank may be up to kCells steps ahead of the slowest reader.
//
//   | failure record | control, rank 0 | control, rank 1 | ... | slots of rank 0 | slots of rank 1 | ...
//   a slot: | header: what this rank called | payload |
//
// Messages from one rank to another have a layout of 2 ranks each, the sender first, behind all that; for every ordered
// pair, so that a pair's first message needs no talk about where to meet. They are parts of the file that nobody maps
// until the pair uses them, and of which only pages that were written to take memory: what is there for 64 ranks, 17 GB
// of file, costs nothing. (Memory of its own for each pair, handed over at first use, would be smaller on paper, but
// the receiver would depend on a file of the sender's that it has yet to open.)
//
//   | the above | messages 0 to 0, unused | 0 to 1 | ... | 1 to 0 | ...

#include <algorithm>
#include <cstdint>

namespace tessera {

struct ShmLayout {
  /// Payload of a slot, and slots of a rank: a message is cut into pieces that stay in the cache between the rank that
  /// writes and those that read, and the ring takes the ranks' jitter. Measured with 2 ranks that gather 16 MiB each:
  /// 64 KiB to 512 KiB and 4 to 16 slots perform equally, fewer or smaller ones lose, more fall out of the cache.
  static constexpr int64_t kCellBytes = int64_t{256} * 1024;
  static constexpr int64_t kCells = 8;
  static constexpr int64_t kFailureBytes = 1024;
  static constexpr int64_t kControlBytes = 512;
  static constexpr int64_t kPage = 4096;
  static constexpr int64_t kAlignment = 64;
  /// Of a SharedPlace.
  static constexpr int64_t kPlaceBytes = 32;
  /// Of what is mapped on its own: the largest page that a system may have.
  static constexpr int64_t kMapAlignment = int64_t{64} * 1024;

  int64_t ranks = 1;

  static constexpr int64_t round_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
  }

  /// Room for a CellHeader and, for each rank, what goes to and comes from it in an all_to_all, or where it finds its
  /// piece of a reduce_scatter.
  constexpr int64_t header_bytes() const { return round_up(kAlignment + ranks * kPlaceBytes, kAlignment); }
  /// A slot's page of its own more than the payload also keeps equal offsets of slots apart in the cache.
  constexpr int64_t slot_stride() const { return round_up(header_bytes() + kCellBytes, kPage); }
  constexpr int64_t control_offset(int64_t rank) const { return kFailureBytes + rank * kControlBytes; }
  constexpr int64_t slot_offset(int64_t rank, uint64_t step) const {
    return round_up(control_offset(ranks), kPage) +
           (rank * kCells + static_cast<int64_t>(step % kCells)) * slot_stride();
  }
  /// Without room for messages.
  constexpr int64_t total_bytes() const { return slot_offset(ranks, 0); }

  static constexpr ShmLayout of_messages();
  constexpr int64_t messages_offset(int64_t from, int64_t to) const {
    return round_up(total_bytes(), kMapAlignment) +
           (from * ranks + to) * round_up(of_messages().total_bytes(), kMapAlignment);
  }
  constexpr int64_t file_bytes() const { return messages_offset(ranks, 0); }

  /// Payload for each rank where a slot carries a different part for each.
  constexpr int64_t part_bytes() const { return std::max(kAlignment, kCellBytes / ranks / kAlignment * kAlignment); }
};

constexpr ShmLayout ShmLayout::of_messages() {
  return {.ranks = 2};
}

/// part_bytes() for each rank must fit into a slot.
constexpr int64_t kShmMaxRanks = ShmLayout::kCellBytes / ShmLayout::kAlignment;

}  // namespace tessera
