#include "comm/gloo/gloo_work.h"

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
  std::list<GlooTransfers> freed;  // after the lock
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
  for (auto& [work, peer] : launch.works) {
    if (!work) {
      continue;
    }
    bool is_done = false;
    try {
      is_done = work->wait(resolve_timeout(timeout, *info_));
    } catch (const std::exception& failure) {
      // Not only at a time-out: the peer's, which may be a moment earlier, closes the connection.
      const auto error = gloo_error(describe(call_), *info_, failure, peer);
      throw CommError(error.what() + shared_->notes.compare(launch.collective, call_, *info_, peer));
    }
    TESSERA_CHECK(CommError, is_done, "{} on {}: the group was destroyed", describe(call_), describe(*info_));
    const std::lock_guard lock(mutex_);
    work.reset();
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

void GlooWork::give_up() noexcept {
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
