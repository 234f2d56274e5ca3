#pragma once
// The calls that a rank of an "shm" group has launched and not finished, and the movement of their bytes through the
// cells (comm/shm_plan.h). Never waits: advance() does what the peers' progress allows.
//
// All calls of a group form one sequence of steps, in the order of launch, which is the same on all ranks. A rank puts
// its piece of a step into its cell as soon as the cell is free, so small calls are on their way when launch returns,
// and takes the others' pieces in the order of the steps.

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "comm/shm_arena.h"
#include "comm/shm_plan.h"

namespace tessera {

/// Thread safety: for one thread at a time.
class ShmQueue {
 public:
  /// `arena` must outlive the queue.
  ShmQueue(const ShmArena& arena, int rank);

  /// Adds a call; its number counts from 0. The tensors are kept until it is done.
  uint64_t push(LocalCall call);
  /// Moves all that can be moved; returns whether anything was.
  bool advance();

  bool is_empty() const { return operations_.empty(); }
  bool is_done(uint64_t number) const { return number < done_; }
  /// Of a call that is not done.
  const CallShape& shape(uint64_t number) const { return operations_[number - done_].shape; }

  /// "", or what the ranks called where that does not belong together: nothing moves any more.
  const std::string& mismatch() const { return mismatch_; }
  /// The ranks without which nothing moves.
  std::vector<int> missing() const;
  /// Bits of RankControl::awaits: what lets advance() go on.
  uint32_t awaited() const;

 private:
  struct Operation {
    LocalCall call;
    CallShape shape;
    ShmPlan plan;
    char* input;          // null: parts, or none
    char* output;         // the same
    int64_t stream_from;  // received pieces of so many bytes bypass the cache
    bool agreed;          // the ranks' headers were compared
  };
  struct Cursor {
    size_t operation = 0;
    size_t phase = 0;
    int64_t step = 0;
  };

  bool put();
  bool take();
  bool find_phase_to_put();
  bool agree(Operation& operation);
  bool has_room() const;
  bool has_posted(int peer, uint64_t step) const;
  void put_pieces(const Operation& operation, const ShmPhase& phase);
  void put_own(const Operation& operation, const ShmPhase& phase);
  void take_pieces(const Operation& operation, const ShmPhase& phase);
  void reduce_pieces(const Operation& operation, const ShmPhase& phase);
  void step_taken();
  void publish(std::atomic<uint64_t>& counter, uint64_t value, uint32_t awaited_by);

  const ShmArena& arena_;
  const int rank_;
  const int ranks_;
  std::deque<Operation> operations_;
  uint64_t done_ = 0;
  uint64_t posted_ = 0;
  uint64_t taken_ = 0;
  Cursor put_cursor_;
  Cursor take_cursor_;  // its operation is always the first
  // The peers' counters as last read.
  mutable std::vector<uint64_t> peers_posted_;
  mutable std::vector<uint64_t> peers_consumed_;
  std::string mismatch_;
};

}  // namespace tessera
