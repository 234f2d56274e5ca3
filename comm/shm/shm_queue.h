#pragma once
// The calls that a rank of an "shm" group has launched and not finished, and the movement of their bytes through the
// slots (comm/shm/shm_plan.h). Never waits: advance() does what the peers' progress allows.
//
// All calls of a group form one sequence of steps, in the order of launch, which is the same on all ranks. A rank puts
// its piece of a step into its slot as soon as the slot is free, so small calls are on their way when launch returns,
// and takes the others' pieces in the order of the steps.
//
// What is in shared memory (comm/shm/shared_memory.h) is lent: the slots stay empty, and the others take the pieces
// from where they are. Such are the input of an all_gather, and those pieces of a reduce_scatter's input that lie in
// one tensor there, as gradients do, and have 16 KiB or more, which those of groups of more than 16 ranks do not. Such
// a call is done when this rank has its output, and read when the others have theirs too.

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "comm/launch/host_process.h"
#include "comm/shm/shared_memory.h"
#include "comm/shm/shm_arena.h"
#include "comm/shm/shm_plan.h"

namespace tessera {

/// Thread safety: for one thread at a time.
class ShmQueue {
 public:
  /// `arena` must outlive the queue. `processes`: of all ranks.
  ShmQueue(const ShmArena& arena, int rank, const std::vector<HostProcess>& processes);

  /// Adds a call; its number counts from 0. The tensors are kept until it is done, and a lent one until it is read.
  uint64_t push(CollectiveCall call);
  /// Moves all that can be moved; returns whether anything was.
  bool advance();
  /// Nothing moves from now on: whoever waited has an error, and may have given the tensors' memory away.
  void stop() { is_stopped_ = true; }

  bool is_empty() const { return operations_.empty(); }
  bool is_done(uint64_t number) const { return number < done_; }
  /// Whether nobody reads the call's input any more.
  bool is_read(uint64_t number) const {
    return is_done(number) && (exposed_.empty() || exposed_.front().number > number);
  }
  /// Whether peers may still read an input of this rank where it lies.
  bool lends() const;
  /// The ranks that have yet to read an input of a call that is done.
  std::vector<int> readers() const;
  /// Of a call that is not done, or not read.
  const CollectiveSignature& shape(uint64_t number) const;

  /// Whether nothing moves any more: stop(), or one of the next two.
  bool is_stuck() const { return is_stopped_ || !mismatch_.empty() || !fault_.empty(); }
  /// "", or what the ranks called where that does not belong together; all of them find it.
  const std::string& mismatch() const { return mismatch_; }
  /// "", or why this rank cannot read what a peer has lent, or may have read something else.
  const std::string& fault() const { return fault_; }
  /// The ranks without which nothing moves; where all is done, those that have yet to read.
  std::vector<int> missing() const;
  /// Bits of RankControl::awaits: what lets advance() go on.
  uint32_t awaited() const;

 private:
  /// What a peer has lent.
  struct BorrowedInput {
    std::optional<SharedPlace> place = {};
    const char* data = nullptr;
  };
  struct Operation {
    CollectiveCall call;
    CollectiveSignature shape;
    ShmPlan plan;
    char* input;          // null: parts, or none
    char* output;         // the same
    int64_t stream_from;  // received pieces of so many bytes bypass the cache
    std::optional<SharedPlace> lent;
    bool exposes_pieces = false;                       // some, of a reduce_scatter
    bool agreed = false;                               // the ranks' headers were compared
    c10::SmallVector<BorrowedInput, 4> borrowed = {};  // one a rank; empty: none
  };
  /// A call that is done, with an input that peers may still read.
  struct Lent {
    uint64_t number;
    uint64_t end;  // the step behind its last
    CollectiveSignature shape;
    at::Tensor input;
    TensorSegments parts;
  };
  /// What was read where a peer has it.
  struct BorrowedPiece {
    int peer;
    SharedPlace place;
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
  bool borrow(Operation& operation);
  bool check_borrowed();
  bool drop_read();
  uint64_t freed_by_next_put() const;
  bool has_room() const;
  bool has_consumed(int peer, uint64_t step) const;
  bool has_posted(int peer, uint64_t step) const;
  void put_pieces(Operation& operation, const ShmPhase& phase);
  void put_piece(Operation& operation, const ShmPhase& phase, int to);
  void put_own(const Operation& operation, const ShmPhase& phase);
  void take_pieces(const Operation& operation, const ShmPhase& phase);
  void reduce_pieces(const Operation& operation, const ShmPhase& phase);
  const void* own_piece(const Operation& operation, const ShmPhase& phase) const;
  const void* find_piece(const Operation& operation, const ShmPhase& phase, int from);
  void step_taken();
  void finish_first();
  void publish(std::atomic<uint64_t>& counter, uint64_t value, uint32_t awaited_by);

  const ShmArena& arena_;
  const int rank_;
  const int ranks_;
  std::vector<PeerMemory> peer_memory_;
  std::deque<Operation> operations_;
  std::vector<Lent> exposed_;  // in order
  uint64_t done_ = 0;
  uint64_t posted_ = 0;
  uint64_t taken_ = 0;
  Cursor put_cursor_;
  Cursor take_cursor_;                           // its operation is always the first
  c10::SmallVector<BorrowedPiece, 4> borrowed_;  // in the present step
  // The peers' counters as last read.
  mutable std::vector<uint64_t> peers_posted_;
  mutable std::vector<uint64_t> peers_consumed_;
  bool is_stopped_ = false;
  std::string mismatch_;
  std::string fault_;
};

}  // namespace tessera
