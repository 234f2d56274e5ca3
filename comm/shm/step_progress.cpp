#include "comm/shm/step_progress.h"

#include <algorithm>
#include <atomic>

namespace tessera {

StepProgress::StepProgress(const ShmArena& arena, int rank)
    : arena_(arena),
      rank_(rank),
      ranks_(static_cast<int>(arena.layout().ranks)),
      peers_posted_(ranks_, 0),
      peers_taken_(ranks_, 0) {}

void StepProgress::post() {
  publish(arena_.control(rank_).posted, ++posted_, kAwaitsPosted);
}

void StepProgress::take() {
  publish(arena_.control(rank_).consumed, ++taken_, kAwaitsConsumed);
}

void StepProgress::publish(std::atomic<uint64_t>& counter, uint64_t value, uint32_t awaited_by) {
  counter.store(value, std::memory_order_release);
  // Either this rank sees that a peer is about to sleep, or the peer sees the new value before it sleeps.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != rank_) {
      arena_.wake(peer, awaited_by);
    }
  }
}

bool StepProgress::has_posted(int peer, uint64_t step) const {
  if (peers_posted_[peer] <= step) {
    peers_posted_[peer] = arena_.control(peer).posted.load(std::memory_order_acquire);
  }
  return peers_posted_[peer] > step;
}

bool StepProgress::have_all_posted(uint64_t step) const {
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != rank_ && !has_posted(peer, step)) {
      return false;
    }
  }
  return posted_ > step;
}

bool StepProgress::has_taken(int peer, uint64_t step) const {
  if (peers_taken_[peer] < step) {
    peers_taken_[peer] = arena_.control(peer).consumed.load(std::memory_order_acquire);
  }
  return peers_taken_[peer] >= step;
}

bool StepProgress::have_all_taken(uint64_t step) const {
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != rank_ && !has_taken(peer, step)) {
      return false;
    }
  }
  return taken_ >= step;
}

uint64_t StepProgress::freed_by_next_post() const {
  return posted_ - std::min<uint64_t>(posted_, ShmLayout::kSlots - 1);
}

bool StepProgress::has_room() const {
  return have_all_taken(freed_by_next_post());
}

}  // namespace tessera
