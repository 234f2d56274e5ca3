#include "comm/threads/thread_world.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/report.h"
#include "comm/threads/thread_call.h"

namespace tessera {

ThreadGroup::PendingCollective::~PendingCollective() {
  const auto has_tensors = [](const CollectiveCall& call) { return call.input.defined() || call.output.defined(); };
  if (std::ranges::any_of(calls, has_tensors)) {
    try {
      carried_out.synchronize();
    } catch (const std::exception& failure) {
      report_failure("a collective that nobody waited for: {}", failure.what());
    }
  }
}

ThreadGroup::ThreadGroup(std::shared_ptr<ThreadWorld> world, std::vector<int64_t> ranks)
    : world_(std::move(world)), ranks_(std::move(ranks)), calls_made_(ranks_.size(), 0) {}

std::shared_ptr<ThreadGroup> ThreadGroup::messages(RankPair pair) {
  std::lock_guard lock(world_->mutex_);
  std::shared_ptr<ThreadGroup>& group = messages_[pair];
  if (!group) {
    group = world_->make_group({ranks_.at(pair.from), ranks_.at(pair.to)});
  }
  return group;
}

ThreadGroup::PendingCollectivePtr ThreadGroup::post(const GroupInfo& info, int place, CollectiveCall call) {
  PendingCollectivePtr pending;
  StreamEvent ready = StreamEvent::here(call_device(call));
  {
    std::lock_guard lock(world_->mutex_);
    TESSERA_CHECK(CommError, world_->failure_.empty(), "{} on {}: {}", describe(call), describe(info),
                  world_->failure_);
    const size_t number = calls_made_[place]++ - first_open_;
    if (number == open_.size()) {
      open_.push_back(std::make_shared<PendingCollective>());
      open_.back()->calls.resize(ranks_.size());
      open_.back()->arrived.resize(ranks_.size());
      open_.back()->ready.resize(ranks_.size());
      open_.back()->missing = static_cast<int>(ranks_.size());
    }
    pending = open_[number];
    pending->calls[place] = std::move(call);
    pending->arrived[place] = true;
    pending->ready[place] = std::move(ready);
    if (--pending->missing != 0) {
      return pending;
    }
    TESSERA_ASSERT(number == 0, "collective {} is complete before the first", number);
    open_.pop_front();
    ++first_open_;
  }
  finish(*pending);
  return pending;
}

// Runs without the lock: all ranks have arrived, so nothing else accesses the calls until `done` is set.
void ThreadGroup::finish(PendingCollective& pending) {
  std::vector<CollectiveSignature> shapes;
  for (const CollectiveCall& call : pending.calls) {
    shapes.push_back(make_signature(call));
  }
  std::string error = find_mismatch(shapes);
  if (error.empty()) {
    try {
      carry_out(pending);
    } catch (const std::exception& failure) {
      error = failure.what();
    }
  }
  {
    const std::lock_guard lock(world_->mutex_);
    pending.error = std::move(error);
    pending.done = true;
  }
  changed_.notify_all();  // without the lock, which the woken threads need
}

/// On a device with streams, runs on the group's own stream, like NCCL, so that later work on a rank's stream may
/// overlap.
void ThreadGroup::carry_out(PendingCollective& pending) {
  const c10::Device device = call_device(pending.calls[0]);
  if (!has_streams(device.type())) {
    execute(pending.calls);
    return;
  }
  if (!stream_) {
    stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  }
  const c10::StreamGuard guard(*stream_);
  for (const StreamEvent& ready : pending.ready) {
    ready.wait();
  }
  try {
    execute(pending.calls);
  } catch (...) {
    pending.carried_out = StreamEvent::here(device);
    throw;
  }
  pending.carried_out = StreamEvent::here(device);
}

bool ThreadGroup::is_hopeless(const PendingCollective& pending) const {
  const auto has_left = [&](int64_t rank) { return world_->left_[rank]; };
  return pending.missing != 0 && (!world_->failure_.empty() || std::ranges::any_of(missing_ranks(pending), has_left));
}

ThreadGroup::State ThreadGroup::state(const PendingCollective& pending) const {
  const std::lock_guard lock(world_->mutex_);
  if (pending.done) {
    return pending.error.empty() ? State::Done : State::Failed;
  }
  return is_hopeless(pending) ? State::Failed : State::Open;
}

void ThreadGroup::wait(const GroupInfo& info, int place, const PendingCollectivePtr& pending,
                       std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  CollectiveCall own;  // destroyed by this rank, after unlocking: peers must not be the last to hold its tensors
  std::unique_lock lock(world_->mutex_);
  const auto has_left = [&](int64_t rank) { return world_->left_[rank]; };
  // Once all have arrived, the call is always carried out, and its tensors are in use until then.
  const auto over = [&] { return pending->done || is_hopeless(*pending); };
  const bool in_time = changed_.wait_until(lock, deadline, over);
  if (!in_time && pending->missing == 0) {
    changed_.wait(lock, over);
  }
  own = std::exchange(pending->calls[place], {});
  pending->carried_out.wait();
  if (pending->done && pending->error.empty()) {
    return;
  }
  std::string reason = pending->done ? pending->error : world_->failure_;
  if (reason.empty()) {
    std::vector<int64_t> absent = missing_ranks(*pending);
    if (in_time) {
      std::erase_if(absent, std::not_fn(has_left));
    }
    reason = fmt::format(
        "rank(s) [{}] {}", fmt::join(absent, ", "),
        in_time ? "have ended without calling it" : fmt::format("did not arrive within {} ms", timeout.count()));
  }
  reason = fmt::format("{} on {}: {}", describe(own), describe(info), reason);
  if (!in_time && !pending->done) {
    world_->fail(info.ranks[info.rank], reason);
  }
  throw CommError(reason);
}

std::vector<int64_t> ThreadGroup::missing_ranks(const PendingCollective& pending) const {
  std::vector<int64_t> missing;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (!pending.arrived[i]) {
      missing.push_back(ranks_[i]);
    }
  }
  return missing;
}

ThreadWorld::ThreadWorld(int size) {
  TESSERA_CHECK(ValueError, size >= 1, "ThreadWorld: {} ranks; at least one is needed", size);
  left_.resize(size, false);
}

void ThreadWorld::leave(int64_t rank) {
  std::lock_guard lock(mutex_);
  left_.at(rank) = true;
  notify_all_groups();
}

void ThreadWorld::abort(int64_t rank, const std::string& reason) {
  std::lock_guard lock(mutex_);
  fail(rank, reason);
}

void ThreadWorld::fail(int64_t rank, const std::string& reason) {
  left_.at(rank) = true;
  if (failure_.empty()) {
    failure_ = fmt::format("rank {} failed: {}", rank, reason);
  }
  notify_all_groups();
}

void ThreadWorld::notify_all_groups() {
  for (const std::weak_ptr<ThreadGroup>& group : groups_) {
    if (const auto alive = group.lock()) {
      alive->changed_.notify_all();
    }
  }
}

std::shared_ptr<ThreadGroup> ThreadWorld::make_group(const std::vector<int64_t>& ranks) {
  auto group = std::make_shared<ThreadGroup>(shared_from_this(), ranks);
  std::erase_if(groups_, [](const auto& other) { return other.expired(); });
  groups_.push_back(group);
  return group;
}

std::shared_ptr<ThreadGroup> ThreadWorld::join(const std::string& key, const std::vector<int64_t>& ranks) {
  std::lock_guard lock(mutex_);
  Joining& joining = joining_[key];
  std::shared_ptr<ThreadGroup> group = joining.group.lock();
  if (!group) {
    group = make_group(ranks);
    joining.group = group;
  }
  TESSERA_CHECK(CommError, group->ranks_ == ranks, "group '{}': rank sets [{}] and [{}] have the same name", key,
                fmt::join(group->ranks_, ", "), fmt::join(ranks, ", "));
  if (++joining.joined == ranks.size()) {
    joining_.erase(key);
  }
  return group;
}

}  // namespace tessera
