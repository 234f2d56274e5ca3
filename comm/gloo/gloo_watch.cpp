#include "comm/gloo/gloo_watch.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <exception>

#include "base/error.h"
#include "comm/launch/job_store.h"

namespace tessera {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kInterval(100);

}  // namespace

GlooWatch::GlooWatch(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> probes, std::vector<HostProcess> members)
    : rank_(rank), members_(std::move(members)), own_(this_process()), probes_(std::move(probes)) {
  thread_ = std::thread([this] { run(); });
}

GlooWatch::~GlooWatch() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  ends_.notify_all();
  thread_.join();
}

void GlooWatch::run() {
  std::unique_lock lock(mutex_);
  while (!ends_.wait_for(lock, kInterval, [&] { return stops_; })) {
    for (const Scope* const scope : scopes_) {
      scope->interrupt_();
    }
  }
}

GlooWatch::Scope::Scope(GlooWatch& watch, std::function<void()> interrupt)
    : watch_(watch), interrupt_(std::move(interrupt)) {
  const std::lock_guard lock(watch_.mutex_);
  watch_.scopes_.push_back(this);
}

GlooWatch::Scope::~Scope() {
  const std::lock_guard lock(watch_.mutex_);
  std::erase(watch_.scopes_, this);
}

bool GlooWatch::is_closed(int peer) {
  const std::lock_guard lock(mutex_);
  auto& probe = probes_.at(static_cast<size_t>(peer));
  if (peer == rank_ || !probe) {
    return peer != rank_;
  }
  try {
    probe->abort();  // so that it does not wait
    probe->wait(kLongestTimeout);
    return false;
  } catch (const std::exception&) {
    probe.reset();
    return true;
  }
}

void GlooWatch::wait_for(c10d::Work& transfer, int peer, milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + timeout;
  const Scope scope(*this, [&] { transfer.abort(); });
  int waits = 0;
  while (!transfer.wait(std::max(std::chrono::duration_cast<milliseconds>(deadline - Clock::now()), milliseconds(1)))) {
    TESSERA_CHECK(CommError, waits < kWaitsUntilLost, "the connection has ended");
    check_waits();
    waits = is_closed(peer) ? waits + 1 : 0;
  }
}

void GlooWatch::check_waits() {
  const std::string fault = find_wait_fault();
  TESSERA_CHECK(CommError, fault.empty(), "{}", fault);
}

bool GlooWatch::has_died(int member) const {
  return !members_.empty() && tessera::has_died(members_.at(static_cast<size_t>(member)), own_);
}

void GlooWatch::check_members(const std::string& call, const GroupInfo& info, int peer) const {
  constexpr int kLooks = 10;
  constexpr milliseconds kPause(10);
  if (members_.empty()) {
    return;
  }
  // When a process ends, its connections end first.
  for (int look = 0; look < kLooks && members_.at(static_cast<size_t>(peer)).host == own_.host && !has_died(peer);
       ++look) {
    std::this_thread::sleep_for(kPause);
  }
  std::vector<int64_t> dead;
  for (int member = 0; member < info.size(); ++member) {
    if (has_died(member)) {
      dead.push_back(info.ranks[static_cast<size_t>(member)]);
    }
  }
  TESSERA_CHECK(CommError, dead.empty(), "{} on {}: rank(s) [{}] have died", call, describe(info),
                fmt::join(dead, ", "));
}

}  // namespace tessera
