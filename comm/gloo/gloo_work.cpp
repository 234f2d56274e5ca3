#include "comm/gloo/gloo_work.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "comm/gloo/gloo_error.h"

namespace tessera {

void DroppedTransfers::keep(std::list<GlooTransfers>& transfers) noexcept {
  const std::lock_guard lock(mutex_);
  kept_.splice(kept_.end(), transfers);
}

void DroppedTransfers::free_before(uint64_t launch) {
  std::list<GlooTransfers> freed;  // freed after unlocking
  const std::lock_guard lock(mutex_);
  for (auto entry = kept_.begin(); entry != kept_.end();) {
    const auto next = std::next(entry);
    if (entry->launch < launch) {
      freed.splice(freed.end(), kept_, entry);
    }
    entry = next;
  }
}

GlooWork::GlooWork(CollectiveSignature call, std::shared_ptr<const GroupInfo> info, std::shared_ptr<GlooShared> shared,
                   std::list<GlooTransfers> transfers, std::function<void()> finish)
    : call_(std::move(call)),
      info_(std::move(info)),
      shared_(std::move(shared)),
      transfers_(std::move(transfers)),
      finish_(std::move(finish)) {}

GlooWork::~GlooWork() {
  shared_->dropped.keep(transfers_);
}

bool GlooWork::wait(std::chrono::milliseconds timeout) {
  if (transfers_.empty()) {
    return true;
  }
  GlooTransfers& launch = transfers_.front();
  const Clock::time_point deadline = Clock::now() + resolve_timeout(timeout, *info_);
  {
    const GlooWatch::Scope scope(shared_->watch, [this] { interrupt(); });
    for (auto& transfer : launch.works) {
      while (transfer.work && !wait_once(transfer, deadline)) {
        GlooWatch::check_waits();
        look_for_lost(deadline);
      }
    }
  }
  if (finish_) {
    finish_();
    finish_ = nullptr;
  }
  if (launch.with_all) {
    shared_->dropped.free_before(launch.launch);
  }
  const std::lock_guard lock(mutex_);
  transfers_.clear();
  return true;
}

bool GlooWork::wait_once(GlooTransfers::Transfer& transfer, Clock::time_point deadline) {
  constexpr std::chrono::milliseconds kShortest(1);  // 0 would mean gloo's default
  bool is_done = false;
  try {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    is_done = transfer.work->wait(std::max(left, kShortest));
  } catch (const std::exception& failure) {
    raise(failure, transfer.peer);
  }
  const std::lock_guard lock(mutex_);
  if (is_done) {
    transfer.work.reset();
    return true;
  }
  TESSERA_CHECK(CommError, !is_given_up_, "{} on {}: the group was destroyed", describe(call_), describe(*info_));
  return false;
}

void GlooWork::look_for_lost(Clock::time_point deadline) {
  for (auto& transfer : transfers_.front().works) {
    if (!transfer.work || !shared_->watch.is_closed(transfer.peer)) {
      continue;
    }
    int waits = 0;
    while (waits < kWaitsUntilLost && !wait_once(transfer, deadline)) {
      ++waits;
    }
    if (waits == kWaitsUntilLost) {
      raise(CommError("the connection has ended"), transfer.peer);
    }
  }
}

// Not only at this rank's timeout: the peer's timeout, which may be slightly earlier, closes the connection.
void GlooWork::raise(const std::exception& failure, int peer) const {
  shared_->watch.check_members(describe(call_), *info_, peer);
  const auto error = gloo_error(describe(call_), *info_, failure, peer);
  throw CommError(error.what() + shared_->notes.compare(transfers_.front().collective, call_, *info_, peer));
}

void GlooWork::give_up() noexcept {
  {
    const std::lock_guard lock(mutex_);
    is_given_up_ = true;
  }
  interrupt();
}

void GlooWork::interrupt() noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& launch : transfers_) {
    for (const auto& [work, peer] : launch.works) {
      if (work) {
        work->abort();
      }
    }
  }
}

}  // namespace tessera
