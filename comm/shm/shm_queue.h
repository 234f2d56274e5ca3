#pragma once
// Unfinished calls of a rank of an "shm" group, and the movement of their bytes through slots (comm/shm/shm_plan.h).
// Never waits: advance() goes as far as the peers' progress allows.
//
// All calls of a group form one sequence of steps in launch order, which is equal on all ranks. A rank puts a piece
// into its slot as soon as the slot is free, so small calls are sent when launch returns, and takes peers' pieces in
// order of steps.
//
// Inputs in shared memory (comm/shm/shared_memory.h) do not move through slots; peers read them in place. This applies
// to the input of an all_gather, and to pieces of a reduce_scatter's input that are within one such tensor and have 16
// KiB or more, in groups of up to 16 ranks. Such a call is done when this rank has its output, and read when the others
// have theirs too.

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
#include "comm/shm/step_progress.h"

namespace tessera {

/// Thread safety: one thread at a time.
class ShmQueue {
 public:
  /// `arena` must outlive the queue. `processes` are those of all ranks.
  ShmQueue(const ShmArena& arena, int rank, const std::vector<HostProcess>& processes);

  /// Adds a call and returns its number, from 0. Tensors are kept until it is done, and an input in shared memory until
  /// read.
  uint64_t push(CollectiveCall call);
  /// Moves all that can be moved, and returns whether anything was.
  bool advance();
  /// Stops all movement: waits have failed, and the tensors' memory may be gone.
  void stop() { is_stopped_ = true; }

  bool is_empty() const { return operations_.empty(); }
  bool is_done(uint64_t number) const { return number < done_; }
  /// Returns whether no rank reads the call's input any more.
  bool is_read(uint64_t number) const {
    return is_done(number) && (exposed_.empty() || exposed_.front().number > number);
  }
  /// Returns whether peers may still read an input of this rank in place.
  bool exposes_inputs() const;
  /// Returns the ranks that have yet to read an input of a call that is done.
  std::vector<int> readers() const;
  /// Returns the signature of a call that is not done, or not read.
  const CollectiveSignature& shape(uint64_t number) const;

  /// Returns whether nothing can move after stop(), a mismatch or a fault.
  bool is_stuck() const { return is_stopped_ || !mismatch_.empty() || !fault_.empty(); }
  /// Returns the ranks' calls if they do not match, otherwise ""; all ranks find it.
  const std::string& mismatch() const { return mismatch_; }
  /// Returns why this rank cannot read a peer's memory, or may have read something else; otherwise "".
  const std::string& fault() const { return fault_; }
  /// Returns the ranks that block progress or, if all is done, those that have yet to read.
  std::vector<int> missing() const;
  /// Returns bits of RankControl::awaits that would let advance() continue.
  uint32_t awaited() const;

 private:
  /// Input of a peer that is read in place.
  struct ExposedInput {
    std::optional<SharedPlace> place = {};
    const char* data = nullptr;
  };
  struct Operation {
    CollectiveCall call;
    CollectiveSignature shape;
    ShmPlan plan;
    char* input;          // null for segments, or without input
    char* output;         // likewise
    int64_t stream_from;  // received pieces of at least this many bytes bypass the cache
    std::optional<SharedPlace> exposed;
    bool exposes_pieces = false;                            // peers read some pieces of a reduce_scatter in place
    bool agreed = false;                                    // the ranks' headers were compared
    c10::SmallVector<ExposedInput, 4> exposed_inputs = {};  // one per rank; empty if there are none
  };
  /// Call that is done, with an input that peers may still read.
  struct ExposedCall {
    uint64_t number;
    uint64_t end;  // one past its last step
    CollectiveSignature shape;
    at::Tensor input;
    TensorSegments parts;
  };
  /// Piece that was read in a peer's memory.
  struct ZeroCopyRead {
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
  bool find_exposed_inputs(Operation& operation);
  bool check_zero_copy_reads();
  bool drop_read();
  void put_pieces(Operation& operation, const ShmPhase& phase);
  void put_piece(Operation& operation, const ShmPhase& phase, int to);
  void put_own(const Operation& operation, const ShmPhase& phase);
  void take_pieces(const Operation& operation, const ShmPhase& phase);
  void reduce_pieces(const Operation& operation, const ShmPhase& phase);
  const void* own_piece(const Operation& operation, const ShmPhase& phase) const;
  const void* find_piece(const Operation& operation, const ShmPhase& phase, int from);
  void step_taken();
  void finish_first();

  const ShmArena& arena_;
  const int rank_;
  const int ranks_;
  StepProgress progress_;
  std::vector<PeerMemory> peer_memory_;
  std::deque<Operation> operations_;
  std::vector<ExposedCall> exposed_;  // in order
  uint64_t done_ = 0;
  Cursor put_cursor_;
  Cursor take_cursor_;                                 // its operation is always the first
  c10::SmallVector<ZeroCopyRead, 4> zero_copy_reads_;  // in the current step
  bool is_stopped_ = false;
  std::string mismatch_;
  std::string fault_;
};

}  // namespace tessera
