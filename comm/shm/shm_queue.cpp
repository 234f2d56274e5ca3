#include "comm/shm/shm_queue.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "comm/backend/stream_copy.h"
#include "comm/shm/slot_header.h"

namespace tessera {

namespace {

// An output of this size is larger than a rank's share of any cache.
constexpr int64_t kStreamBytes = int64_t{16} * 1024 * 1024;

char* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<char*>(tensor.mutable_data_ptr()) : nullptr;
}

}  // namespace

ShmQueue::ShmQueue(const ShmArena& arena, int rank, const std::vector<HostProcess>& processes)
    : arena_(arena),
      rank_(rank),
      ranks_(static_cast<int>(arena.layout().ranks)),
      peers_posted_(ranks_, 0),
      peers_consumed_(ranks_, 0) {
  for (const HostProcess& process : processes) {
    peer_memory_.emplace_back(process.pid);
  }
}

uint64_t ShmQueue::push(CollectiveCall call) {
  CollectiveSignature shape = shape_of(call);
  ShmPlan plan = plan_call(shape, rank_, arena_.layout());
  const bool streams =
      shape.output >= 0 && shape.output * static_cast<int64_t>(c10::elementSize(shape.dtype)) >= kStreamBytes;
  const bool may_expose = shape.kind == Collective::AllGather && ranks_ > 1;
  auto lent = may_expose ? shared_place(call.input) : std::nullopt;
  char* const input = data_or_null(call.input);
  char* const output = data_or_null(call.output);
  operations_.push_back({.call = std::move(call),
                         .shape = std::move(shape),
                         .plan = std::move(plan),
                         .input = input,
                         .output = output,
                         .stream_from = streams ? 0 : kNeverStream,
                         .lent = lent});
  return done_ + operations_.size() - 1;
}

bool ShmQueue::advance() {
  bool has_moved = false;
  while (!is_stuck()) {
    // In turns, so that the ranks work on the same few slots while those are in the cache.
    const bool has_put = put(), has_taken = take();
    if (!has_put && !has_taken) {
      break;
    }
    has_moved = true;
  }
  return drop_read() || has_moved;
}

bool ShmQueue::put() {
  if (!find_phase_to_put() || !has_room()) {
    return false;
  }
  Operation& operation = operations_[put_cursor_.operation];
  const ShmPhase& phase = operation.plan.phases[put_cursor_.phase];
  if (phase.after_previous && put_cursor_.step == 0 && taken_ != posted_) {
    return false;
  }
  if (put_cursor_.phase == 0 && put_cursor_.step == 0) {
    write_header(arena_.slot(rank_, posted_), operation.shape, phase.steps, operation.lent);
  }
  put_pieces(operation, phase);
  ++put_cursor_.step;
  publish(arena_.control(rank_).posted, ++posted_, kAwaitsPosted);
  return true;
}

// Moves the cursor over phases and calls of which all is put.
bool ShmQueue::find_phase_to_put() {
  while (put_cursor_.operation < operations_.size()) {
    const Operation& operation = operations_[put_cursor_.operation];
    if (put_cursor_.step < operation.plan.phases[put_cursor_.phase].steps) {
      return true;
    }
    if (operation.plan.steps_by_agreement && !operation.agreed) {
      return false;
    }
    const bool is_last = put_cursor_.phase + 1 == operation.plan.phases.size();
    put_cursor_ = is_last ? Cursor{.operation = put_cursor_.operation + 1}
                          : Cursor{.operation = put_cursor_.operation, .phase = put_cursor_.phase + 1};
  }
  return false;
}

bool ShmQueue::take() {
  if (taken_ == posted_) {
    return false;
  }
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != rank_ && !has_posted(peer, taken_)) {
      return false;
    }
  }
  Operation& operation = operations_.front();
  if (!operation.agreed && !agree(operation)) {
    return false;
  }
  borrowed_.clear();
  take_pieces(operation, operation.plan.phases[take_cursor_.phase]);
  if (!check_borrowed()) {
    return false;
  }
  step_taken();
  return true;
}

bool ShmQueue::agree(Operation& operation) {
  c10::SmallVector<const char*, 8> slots;
  for (int rank = 0; rank < ranks_; ++rank) {
    slots.push_back(arena_.slot(rank, taken_));
  }
  HeaderAgreement agreement = compare_headers(slots);
  mismatch_ = std::move(agreement.mismatch);
  if (operation.plan.steps_by_agreement) {
    operation.plan.phases[0].steps = agreement.steps;
  }
  operation.agreed = true;
  return mismatch_.empty() && borrow(operation);
}

void ShmQueue::step_taken() {
  publish(arena_.control(rank_).consumed, ++taken_, kAwaitsConsumed);
  const ShmPlan& plan = operations_.front().plan;
  if (++take_cursor_.step < plan.phases[take_cursor_.phase].steps) {
    return;
  }
  take_cursor_.step = 0;
  if (++take_cursor_.phase < plan.phases.size()) {
    return;
  }
  take_cursor_.phase = 0;
  finish_first();
}

void ShmQueue::finish_first() {
  Operation& operation = operations_.front();
  if (operation.lent || operation.exposes_pieces) {
    exposed_.push_back(
        {done_, taken_, std::move(operation.shape), std::move(operation.call.input), std::move(operation.call.parts)});
  }
  operations_.pop_front();
  ++done_;
  put_cursor_ =
      put_cursor_.operation == 0 ? Cursor{} : Cursor{put_cursor_.operation - 1, put_cursor_.phase, put_cursor_.step};
}

/// Returns whether any was; lets go of their inputs.
bool ShmQueue::drop_read() {
  const auto unread = std::find_if(exposed_.begin(), exposed_.end(), [&](const Lent& lent) {
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer != rank_ && !has_consumed(peer, lent.end)) {
        return true;
      }
    }
    return false;
  });
  const bool any = unread != exposed_.begin();
  exposed_.erase(exposed_.begin(), unread);
  return any;
}

bool ShmQueue::lends() const {
  return !exposed_.empty() || std::any_of(operations_.begin(), operations_.end(), [](const auto& operation) {
    return operation.lent || operation.exposes_pieces;
  });
}

std::vector<int> ShmQueue::readers() const {
  std::vector<int> peers;
  for (int peer = 0; !exposed_.empty() && peer < ranks_; ++peer) {
    if (peer != rank_ && !has_consumed(peer, exposed_.back().end)) {
      peers.push_back(peer);
    }
  }
  return peers;
}

const CollectiveSignature& ShmQueue::shape(uint64_t number) const {
  return number < done_ ? exposed_.front().shape : operations_[number - done_].shape;
}

void ShmQueue::publish(std::atomic<uint64_t>& counter, uint64_t value, uint32_t awaited_by) {
  counter.store(value, std::memory_order_release);
  // Either this rank sees that a peer is about to sleep, or the peer sees the new value before it does.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != rank_) {
      arena_.wake(peer, awaited_by);
    }
  }
}

bool ShmQueue::has_posted(int peer, uint64_t step) const {
  if (peers_posted_[peer] <= step) {
    peers_posted_[peer] = arena_.control(peer).posted.load(std::memory_order_acquire);
  }
  return peers_posted_[peer] > step;
}

/// Whether it has taken all steps before `step`.
bool ShmQueue::has_consumed(int peer, uint64_t step) const {
  if (peers_consumed_[peer] < step) {
    peers_consumed_[peer] = arena_.control(peer).consumed.load(std::memory_order_acquire);
  }
  return peers_consumed_[peer] >= step;
}

/// The steps before this one were in the slots up to that which this rank fills next.
uint64_t ShmQueue::freed_by_next_put() const {
  return posted_ - std::min<uint64_t>(posted_, ShmLayout::kCells - 1);
}

// Whether all ranks have taken what this rank's next slot held before: this one too, where that was parts of its own.
bool ShmQueue::has_room() const {
  const uint64_t freed = freed_by_next_put();
  if (taken_ < freed) {
    return false;
  }
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != rank_ && !has_consumed(peer, freed)) {
      return false;
    }
  }
  return true;
}

std::vector<int> ShmQueue::missing() const {
  const bool only_unread = operations_.empty() && !exposed_.empty();
  const uint64_t consumed = only_unread ? exposed_.front().end : freed_by_next_put();
  std::vector<int> peers;
  for (int peer = 0; peer < ranks_; ++peer) {
    const bool blocks = taken_ < posted_ ? !has_posted(peer, taken_) : !has_consumed(peer, consumed);
    if (peer != rank_ && blocks) {
      peers.push_back(peer);
    }
  }
  return peers;
}

uint32_t ShmQueue::awaited() const {
  return (taken_ < posted_ ? kAwaitsPosted : 0) | (has_room() && exposed_.empty() ? 0 : kAwaitsConsumed);
}

}  // namespace tessera
