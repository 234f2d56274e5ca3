#pragma once
// How far the ranks of an "shm" group have come with its sequence of steps.

#include <cstdint>
#include <vector>

#include "comm/shm/shm_arena.h"

namespace tessera {

/// One rank's counters, which it publishes to its peers, and the peers' counters as last read. A step is posted once a
/// rank has filled its slot, and taken once it has read those of its peers. Thread safety: one thread at a time.
class StepProgress {
 public:
  /// `arena` must outlive the object.
  StepProgress(const ShmArena& arena, int rank);

  /// Returns the number of steps that this rank has posted, or taken.
  uint64_t posted() const { return posted_; }
  uint64_t taken() const { return taken_; }
  /// Counts one more and wakes the peers that wait for it.
  void post();
  void take();

  bool has_posted(int peer, uint64_t step) const;
  bool have_all_posted(uint64_t step) const;
  /// Returns whether `peer` has taken all steps before `step`.
  bool has_taken(int peer, uint64_t step) const;
  bool have_all_taken(uint64_t step) const;

  /// Returns the step before which all must have been taken for this rank's next slot to be free.
  uint64_t freed_by_next_post() const;
  /// Returns whether that is so, on all ranks including this one, which reads its own slot if it has its own parts.
  bool has_room() const;

 private:
  void publish(std::atomic<uint64_t>& counter, uint64_t value, uint32_t awaited_by);

  const ShmArena& arena_;
  const int rank_;
  const int ranks_;
  uint64_t posted_ = 0;
  uint64_t taken_ = 0;
  mutable std::vector<uint64_t> peers_posted_;
  mutable std::vector<uint64_t> peers_taken_;
};

}  // namespace tessera
