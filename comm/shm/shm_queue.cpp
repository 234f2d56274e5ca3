#include "comm/shm/shm_queue.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "comm/backend/stream_copy.h"
#include "comm/shm/slot_header.h"

namespace tessera {

namespace {

// Larger outputs exceed a rank's share of any cache.
constexpr int64_t kStreamBytes = int64_t{16} * 1024 * 1024;

char* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<char*>(tensor.mutable_data_ptr()) : nullptr;
}

}  // namespace

ShmQueue::ShmQueue(const ShmArena& arena, int rank, const std::vector<HostProcess>& processes)
    : arena_(arena), rank_(rank), ranks_(static_cast<int>(arena.layout().ranks)), progress_(arena, rank) {
  for (const HostProcess& process : processes) {
    peer_memory_.emplace_back(process.pid);
  }
}

uint64_t ShmQueue::push(CollectiveCall call) {
  CollectiveSignature shape = make_signature(call);
  ShmPlan plan = plan_call(shape, rank_, arena_.layout());
  const bool streams =
      shape.output >= 0 && shape.output * static_cast<int64_t>(c10::elementSize(shape.dtype)) >= kStreamBytes;
  const bool may_expose = shape.kind == Collective::AllGather && ranks_ > 1;
  auto exposed = may_expose ? shared_place(call.input) : std::nullopt;
  char* const input = data_or_null(call.input);
  char* const output = data_or_null(call.output);
  operations_.push_back({.call = std::move(call),
                         .shape = std::move(shape),
                         .plan = std::move(plan),
                         .input = input,
                         .output = output,
                         .stream_from = streams ? 0 : kNeverStream,
                         .exposed = exposed});
  return done_ + operations_.size() - 1;
}

bool ShmQueue::advance() {
  bool has_moved = false;
  while (!is_stuck()) {
    // Alternates, so that the ranks use the same few slots while these are in the cache.
    const bool has_put = put(), has_taken = take();
    if (!has_put && !has_taken) {
      break;
    }
    has_moved = true;
  }
  return drop_read() || has_moved;
}

bool ShmQueue::put() {
  if (!find_phase_to_put() || !progress_.has_room()) {
    return false;
  }
  Operation& operation = operations_[put_cursor_.operation];
  const ShmPhase& phase = operation.plan.phases[put_cursor_.phase];
  if (phase.after_previous && put_cursor_.step == 0 && progress_.taken() != progress_.posted()) {
    return false;
  }
  if (put_cursor_.phase == 0 && put_cursor_.step == 0) {
    write_header(arena_.slot(rank_, progress_.posted()), operation.shape, phase.steps, operation.exposed);
  }
  put_pieces(operation, phase);
  ++put_cursor_.step;
  progress_.post();
  return true;
}

// Advances the cursor past phases and calls that are completely sent.
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
  if (!progress_.have_all_posted(progress_.taken())) {
    return false;
  }
  Operation& operation = operations_.front();
  if (!operation.agreed && !agree(operation)) {
    return false;
  }
  zero_copy_reads_.clear();
  take_pieces(operation, operation.plan.phases[take_cursor_.phase]);
  if (!check_zero_copy_reads()) {
    return false;
  }
  step_taken();
  return true;
}

bool ShmQueue::agree(Operation& operation) {
  c10::SmallVector<const char*, 8> slots;
  for (int rank = 0; rank < ranks_; ++rank) {
    slots.push_back(arena_.slot(rank, progress_.taken()));
  }
  HeaderAgreement agreement = compare_headers(slots);
  mismatch_ = std::move(agreement.mismatch);
  if (operation.plan.steps_by_agreement) {
    operation.plan.phases[0].steps = agreement.steps;
  }
  operation.agreed = true;
  return mismatch_.empty() && find_exposed_inputs(operation);
}

void ShmQueue::step_taken() {
  progress_.take();
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
  if (operation.exposed || operation.exposes_pieces) {
    exposed_.push_back({done_, progress_.taken(), std::move(operation.shape), std::move(operation.call.input),
                        std::move(operation.call.parts)});
  }
  operations_.pop_front();
  ++done_;
  put_cursor_ =
      put_cursor_.operation == 0 ? Cursor{} : Cursor{put_cursor_.operation - 1, put_cursor_.phase, put_cursor_.step};
}

/// Releases the inputs of calls that have been read, and returns whether there were any.
bool ShmQueue::drop_read() {
  const auto unread =
      std::ranges::find_if(exposed_, [&](const ExposedCall& call) { return !progress_.have_all_taken(call.end); });
  const bool any = unread != exposed_.begin();
  exposed_.erase(exposed_.begin(), unread);
  return any;
}

bool ShmQueue::exposes_inputs() const {
  return !exposed_.empty() || std::any_of(operations_.begin(), operations_.end(), [](const auto& operation) {
    return operation.exposed || operation.exposes_pieces;
  });
}

std::vector<int> ShmQueue::readers() const {
  std::vector<int> peers;
  for (int peer = 0; !exposed_.empty() && peer < ranks_; ++peer) {
    if (peer != rank_ && !progress_.has_taken(peer, exposed_.back().end)) {
      peers.push_back(peer);
    }
  }
  return peers;
}

const CollectiveSignature& ShmQueue::shape(uint64_t number) const {
  return number < done_ ? exposed_.front().shape : operations_[number - done_].shape;
}

std::vector<int> ShmQueue::missing() const {
  const bool only_unread = operations_.empty() && !exposed_.empty();
  const uint64_t consumed = only_unread ? exposed_.front().end : progress_.freed_by_next_post();
  std::vector<int> peers;
  for (int peer = 0; peer < ranks_; ++peer) {
    const bool blocks = progress_.taken() < progress_.posted() ? !progress_.has_posted(peer, progress_.taken())
                                                               : !progress_.has_taken(peer, consumed);
    if (peer != rank_ && blocks) {
      peers.push_back(peer);
    }
  }
  return peers;
}

uint32_t ShmQueue::awaited() const {
  return (progress_.taken() < progress_.posted() ? kAwaitsPosted : 0) |
         (progress_.has_room() && exposed_.empty() ? 0 : kAwaitsConsumed);
}

}  // namespace tessera
