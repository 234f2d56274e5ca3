#include "comm/shm/shm_group.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>

#include "base/error.h"
#include "comm/launch/job_store.h"

namespace tessera {

namespace {

using std::chrono::milliseconds;

// About 50 us: longer than a small collective takes, but too short to matter to another process.
constexpr int kSpins = 2000;
// Interval at which a sleeping rank checks its peers. With an open call in another group, it may have to advance that.
constexpr milliseconds kSleep(50), kSleepWithOtherGroups(1);
// Interval at which it asks the system whether peers still run.
constexpr milliseconds kLookInterval(200);

void spin_once() {
#ifdef __SSE2__
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

/// Groups of this process. Never destroyed, because groups may outlive statics.
struct Registry {
  const pid_t process = getpid();
  std::mutex mutex;
  std::vector<ShmGroup*> groups;
};

/// Returns the registry. A child after fork() starts with an empty one: it does not own its parent's groups, and a
/// thread that it does not have may hold the mutex.
Registry& registry() {
  static std::atomic<Registry*> current = nullptr;
  Registry* known = current.load();
  if (known != nullptr && known->process == getpid()) {
    return *known;
  }
  auto made = std::make_unique<Registry>();
  return *(current.compare_exchange_strong(known, made.get()) ? made.release() : known);
}

}  // namespace

ShmGroup::ShmGroup(std::shared_ptr<const GroupInfo> info, ShmArena arena, std::vector<HostProcess> processes,
                   bool spins)
    : ShmGroup(info, nullptr, std::move(arena), all_members(*info), std::move(processes), spins ? kSpins : 0) {}

ShmGroup::ShmGroup(std::shared_ptr<ShmGroup> whole, RankPair pair)
    : ShmGroup(whole->info_, whole, whole->arena_.messages(pair.from, pair.to),
               {.ranks = {pair.from, pair.to}, .own = pair.from == whole->info_->rank ? 0 : 1},
               {whole->processes_.at(pair.from), whole->processes_.at(pair.to)}, whole->spins_) {}

ShmGroup::ShmGroup(std::shared_ptr<const GroupInfo> info, std::shared_ptr<ShmGroup> whole, ShmArena arena,
                   Members members, std::vector<HostProcess> processes, int spins)
    : info_(std::move(info)),
      whole_(std::move(whole)),
      arena_(std::move(arena)),
      members_(std::move(members)),
      processes_(std::move(processes)),
      process_(getpid()),
      spins_(spins),
      queue_(arena_, members_.own, processes_) {
  std::lock_guard lock(registry().mutex);
  registry().groups.push_back(this);
}

ShmGroup::Members ShmGroup::all_members(const GroupInfo& info) {
  Members members{.own = info.rank};
  members.ranks.resize(info.ranks.size());
  std::iota(members.ranks.begin(), members.ranks.end(), 0);
  return members;
}

ShmGroup::~ShmGroup() {
  if (process_ != getpid()) {
    return;  // the parent still uses it
  }
  end_zero_copy();
  {
    std::lock_guard lock(registry().mutex);
    std::erase(registry().groups, this);
  }
  if (whole_) {
    return;  // the rank leaves when that one is destroyed
  }
  arena_.control(members_.own).left.store(1);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int peer = 0; peer < info_->size(); ++peer) {
    arena_.wake(peer, kAwaitsPosted | kAwaitsConsumed);
  }
}

void ShmGroup::end_zero_copy() noexcept {
  try {
    std::unique_lock lock(mutex_);
    const Clock::time_point deadline = Clock::now() + info_->timeout;
    while (true) {
      queue_.advance();
      std::vector<int> readers = queue_.readers();
      std::erase_if(readers, [&](int peer) { return has_left(peer) || !is_running(processes_[peer]); });
      if (readers.empty() || queue_.is_stuck() || whole_arena().has_failed()) {
        return;
      }
      if (std::uncaught_exceptions() > 0 || Clock::now() >= deadline) {
        // A later reader must learn that the input may have been overwritten.
        whole_arena().fail(fmt::format("rank {} has ended the group before its input was read by rank(s) [{}]",
                                       info_->ranks[info_->rank], global_ranks(readers)));
        return;
      }
      sleep(lock);
    }
  } catch (const std::exception&) {  // later readers get an error
  }
}

uint64_t ShmGroup::launch(CollectiveCall call) {
  std::lock_guard lock(mutex_);
  const std::string failure = failure_.empty() ? whole_arena().failure() : failure_;
  TESSERA_CHECK(CommError, failure.empty(), "{} on {}: {}", describe(call), describe(*info_), failure);
  const uint64_t number = queue_.push(std::move(call));
  queue_.advance();
  return number;
}

bool ShmGroup::has_reached(uint64_t number, Stage stage) {
  std::lock_guard lock(mutex_);
  queue_.advance();
  return is_at(number, stage);
}

bool ShmGroup::is_over(uint64_t number, Stage stage) {
  std::lock_guard lock(mutex_);
  queue_.advance();
  if (is_at(number, stage)) {
    return true;
  }
  const bool has_fault = !find_fault(Clock::now()).empty();
  return !queue_.advance() && has_fault;  // data that ranks posted before they left counts
}

void ShmGroup::wait(uint64_t number, Stage stage, milliseconds timeout) {
  std::unique_lock lock(mutex_);
  timeout = resolve_timeout(timeout, *info_);
  Clock::time_point deadline = Clock::time_point::max();
  for (int idle = 0;; ++idle) {
    idle = queue_.advance() ? 0 : idle;
    if (is_at(number, stage)) {
      return;
    }
    if (idle < spins_ && !queue_.is_stuck()) {
      spin_once();
      continue;
    }
    const Clock::time_point now = Clock::now();
    deadline = deadline == Clock::time_point::max() ? now + timeout : deadline;
    const std::string fault = find_fault(now);
    if (queue_.advance()) {
      continue;  // posted before the ranks left
    }
    if (!fault.empty()) {
      raise(number, fault);
    }
    if (now >= deadline) {
      time_out(number, timeout);
    }
    sleep(lock);
  }
}

void ShmGroup::time_out(uint64_t number, milliseconds timeout) {
  const std::string reason = fmt::format(
      "rank(s) [{}] did not arrive within {} ms; each must call it, and wait for it or another call over shared memory",
      global_ranks(queue_.missing()), timeout.count());
  record(number, reason);
  raise(number, reason);
}

void ShmGroup::record(uint64_t number, const std::string& reason) {
  whole_arena().fail(fmt::format("rank {} failed: {} on {}: {}", info_->ranks[info_->rank],
                                 describe(queue_.shape(number)), describe(*info_), reason));
}

void ShmGroup::sleep(std::unique_lock<std::mutex>& lock) {
  const bool others_are_open = advance_other_groups();
  RankControl& own = arena_.control(members_.own);
  const uint32_t seen = own.futex.load();
  own.awaits.store(queue_.awaited());
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!queue_.advance()) {
    lock.unlock();
    arena_.sleep(members_.own, seen, others_are_open ? kSleepWithOtherGroups : kSleep);
    lock.lock();
  }
  own.awaits.store(0);
}

/// Checks again which ranks are missing once `is_gone` is known: one may have done its part before it left.
template <class IsGone>
std::vector<int> ShmGroup::missing_who(IsGone is_gone) {
  std::vector<int> gone = queue_.missing();
  std::erase_if(gone, [&](int peer) { return !is_gone(peer); });
  if (!gone.empty()) {
    const std::vector<int> still = queue_.missing();
    std::erase_if(gone, [&](int peer) { return std::ranges::find(still, peer) == still.end(); });
  }
  return gone;
}

std::string ShmGroup::find_fault(Clock::time_point now) {
  if (!queue_.fault().empty()) {
    whole_arena().fail(fmt::format("rank {} failed: {}", info_->ranks[info_->rank], queue_.fault()));
    return queue_.fault();
  }
  for (const std::string& reason : {failure_, queue_.mismatch(), whole_arena().failure()}) {
    if (!reason.empty()) {
      return reason;
    }
  }
  auto gone = missing_who([&](int peer) { return has_left(peer); });
  if (!gone.empty()) {
    return fmt::format("rank(s) [{}] have ended without calling it", global_ranks(gone));
  }
  if (now >= next_look_) {
    next_look_ = now + kLookInterval;
    gone = missing_who([&](int peer) { return !is_running(processes_[peer]); });
    if (gone.empty()) {
      return find_wait_fault();
    }
  }
  return gone.empty() ? "" : fmt::format("rank(s) [{}] have died", global_ranks(gone));
}

void ShmGroup::raise(uint64_t number, const std::string& reason) {
  failure_ = reason;
  queue_.stop();
  if (queue_.exposes_inputs()) {
    record(number, reason);  // a later reader must learn that the input may have been overwritten
  }
  throw CommError(fmt::format("{} on {}: {}", describe(queue_.shape(number)), describe(*info_), reason));
}

// Returns whether any of them has an open call. Skips a group that another thread is using.
bool ShmGroup::advance_other_groups() {
  bool any_is_open = false;
  std::lock_guard lock(registry().mutex);
  for (ShmGroup* const group : registry().groups) {
    if (group == this) {
      continue;
    }
    std::unique_lock group_lock(group->mutex_, std::try_to_lock);
    if (group_lock.owns_lock() && !group->queue_.is_empty()) {
      any_is_open = true;
      if (group->queue_.advance()) {
        group->arena_.wake(group->members_.own, kAwaitsPosted | kAwaitsConsumed);
      }
    }
  }
  return any_is_open;
}

std::string ShmGroup::global_ranks(const std::vector<int>& places) const {
  std::vector<int64_t> ranks;
  ranks.reserve(places.size());
  for (const int place : places) {
    ranks.push_back(info_->ranks[members_.ranks[place]]);
  }
  return fmt::format("{}", fmt::join(ranks, ", "));
}

}  // namespace tessera
