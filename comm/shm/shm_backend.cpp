#include "comm/shm/shm_backend.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "base/error.h"
#include "comm/backend/collective_call_backend.h"
#include "comm/launch/job_store.h"
#include "comm/shm/shm_group.h"

namespace tessera {

namespace {

using std::chrono::milliseconds;

constexpr const char* kArenaKey = "arena";
/// Replaces an address.
constexpr const char* kNone = "none";
constexpr const char* kJoined = "joined";

class ShmWork final : public ZeroCopyWork {
 public:
  /// `done` is the stage at which wait() returns.
  ShmWork(std::shared_ptr<ShmGroup> group, uint64_t number, ShmGroup::Stage done)
      : group_(std::move(group)), number_(number), done_(done) {}

  bool wait(milliseconds timeout = kNoTimeout) override {
    wait_for(done_, timeout);
    return true;
  }
  void wait_for_readers() override { wait_for(ShmGroup::Stage::Read, kNoTimeout); }
  bool isCompleted() override { return !group_ || group_->is_over(number_, done_); }
  bool isSuccess() const override { return !group_ || group_->has_reached(number_, done_); }

 private:
  void wait_for(ShmGroup::Stage stage, milliseconds timeout) {
    if (group_) {
      group_->wait(number_, stage, timeout);
    }
    if (stage == ShmGroup::Stage::Read) {
      group_.reset();
    }
  }

  std::shared_ptr<ShmGroup> group_;
  const uint64_t number_;
  const ShmGroup::Stage done_;
};

/// Zero-copy is three times as fast from 64 KiB to 1 MiB, where all data stays in the cache, and a fifth faster at 16
/// MiB. Below, it saves little, and the owner must wait for the readers.
constexpr int64_t kZeroCopyFromBytes = int64_t{64} * 1024;

bool is_worth_zero_copy(int64_t numel, at::ScalarType dtype) {
  return numel * static_cast<int64_t>(c10::elementSize(dtype)) >= kZeroCopyFromBytes;
}

class ShmBackend final : public CollectiveCallBackend {
 public:
  ShmBackend(GroupInfo info, ShmArena arena, std::vector<HostProcess> processes, bool spins)
      : CollectiveCallBackend(std::move(info)),
        group_(std::make_shared<ShmGroup>(shared_info(), std::move(arena), std::move(processes), spins)) {}

  const std::string getBackendName() const override { return "shm"; }
  at::Tensor zeros_to_gather(int64_t numel, at::ScalarType dtype) const override {
    if (is_worth_zero_copy(numel, dtype)) {
      try {
        return shared_zeros(numel, dtype);
      } catch (const CommError& error) {  // only on this rank; the others copy inputs that it does not expose
        TORCH_WARN_ONCE("shards of this rank are not in shared memory, so gathers of them copy once more: ",
                        error.what());
      }
    }
    return GroupBackend::zeros_to_gather(numel, dtype);
  }

 private:
  c10::intrusive_ptr<c10d::Work> post(CollectiveCall call) override {
    const auto done = call.parts ? ShmGroup::Stage::Done : ShmGroup::Stage::Read;
    const uint64_t number = group_->launch(std::move(call));
    return c10::make_intrusive<ShmWork>(group_, number, done);
  }

  c10::intrusive_ptr<c10d::Work> post_message(CollectiveCall call, RankPair pair) override {
    std::shared_ptr<ShmGroup>& messages = messages_[pair];
    if (!messages) {
      messages = std::make_shared<ShmGroup>(group_, pair);
    }
    const uint64_t number = messages->launch(std::move(call));
    return c10::make_intrusive<ShmWork>(messages, number, ShmGroup::Stage::Read);
  }

  const std::shared_ptr<ShmGroup> group_;
  std::map<RankPair, std::shared_ptr<ShmGroup>> messages_;
};

std::string joined_key(int rank) {
  return fmt::format("{}/{}", kJoined, rank);
}

std::string left_key(int rank) {
  return fmt::format("left/{}", rank);
}

/// Protocol by which members find the group's memory: rank 0 publishes its address, then all report whether they have
/// mapped it, and that they no longer need the store.
class Rendezvous {
  using Clock = std::chrono::steady_clock;

 public:
  explicit Rendezvous(const ShmOptions& options)
      : options_(options), info_(options.info), deadline_(Clock::now() + info_.timeout) {}

  ShmArena join() {
    std::optional<ShmArena> arena;
    std::exception_ptr failure;
    try {
      arena.emplace(meet());
    } catch (...) {
      failure = std::current_exception();
    }
    leave_in_order();
    if (failure) {
      std::rethrow_exception(failure);
    }
    return std::move(*arena);
  }

 private:
  ShmArena meet() {
    std::optional<ShmArena> arena;
    std::string result = kJoined;
    try {
      arena.emplace(info_.rank == 0 ? create() : attach());
    } catch (const CommError& failure) {
      result = failure.what();
    }
    options_.store->set(joined_key(info_.rank), result);
    for (int rank = 0; rank < info_.size(); ++rank) {
      const std::string theirs = wait_for(joined_key(rank), rank);
      check(theirs == kJoined,
            fmt::format("rank {}: {}; backend \"gloo\" needs no shared memory", info_.ranks[rank], theirs));
    }
    return std::move(*arena);
  }

  // Rank 0 of the default group, whose process may serve the store, returns last, because it may be about to end. It
  // does not wait for dead ranks, nor longer than the setup's timeout.
  void leave_in_order() noexcept {
    const bool serves = info_.ranks[info_.rank] == 0;
    for (int rank = 0; rank < info_.size(); ++rank) {
      try {
        if (!serves && rank == info_.rank) {
          options_.store->set(left_key(rank), std::string("left"));
        } else if (serves && rank != info_.rank) {
          wait_for(left_key(rank), rank);
        }
      } catch (const std::exception&) {  // earlier failures are already reported, and later ones will be
      }
    }
  }

  ShmArena create() {
    try {
      ShmArena arena = ShmArena::create({.ranks = info_.size()});
      options_.store->set(kArenaKey, arena.address());
      return arena;
    } catch (const CommError&) {
      options_.store->set(kArenaKey, std::string(kNone));
      throw;
    }
  }

  // Writers to the store must not be able to choose which file this rank opens.
  ShmArena attach() {
    const std::string address = wait_for(kArenaKey, 0);
    const std::string files = fmt::format("/proc/{}/fd/", options_.processes[0].pid);
    const bool is_rank_0s = address.starts_with(files) && address.size() > files.size() &&
                            address.find_first_not_of("0123456789", files.size()) == std::string::npos;
    TESSERA_CHECK(CommError, is_rank_0s || address == kNone,
                  "opening rank 0's shared memory: \"{}\" is no open file of its process, {}<number>", address, files);
    TESSERA_CHECK(CommError, is_rank_0s, "rank 0 has no shared memory");
    return ShmArena::attach({.ranks = info_.size()}, address);
  }

  /// Returns the value that `rank` of the group sets. Throws CommError if it does not arrive in time, or the rank dies.
  std::string wait_for(const std::string& key, int rank) {
    const auto look = [&] {
      // A rank that has just ended may have set it before.
      check(is_running(options_.processes[rank]) || options_.store->check({key}),
            fmt::format("rank {} has died", info_.ranks[rank]));
    };
    const auto left = std::chrono::duration_cast<milliseconds>(deadline_ - Clock::now());
    try {
      wait_for_keys(*options_.store, {key}, std::max(left, milliseconds(1)), look);
    } catch (const c10::DistStoreError&) {
      check(false, fmt::format("rank {} did not arrive within {} ms", info_.ranks[rank], info_.timeout.count()));
    }
    return options_.store->get_to_str(key);
  }

  void check(bool holds, const std::string& otherwise) const {
    TESSERA_CHECK(CommError, holds, "connecting the ranks on {}: {}", describe(info_), otherwise);
  }

  const ShmOptions& options_;
  const GroupInfo& info_;
  const Clock::time_point deadline_;
};

}  // namespace

c10::intrusive_ptr<GroupBackend> make_shm_backend(ShmOptions options) {
  TESSERA_CHECK(ValueError, options.info.size() <= kShmMaxRanks, "backend \"shm\": {} ranks; {} are allowed",
                options.info.size(), kShmMaxRanks);
  try {
    ShmArena arena = Rendezvous(options).join();
    const bool spins = sysconf(_SC_NPROCESSORS_ONLN) >= options.host_ranks;
    return c10::make_intrusive<ShmBackend>(std::move(options.info), std::move(arena), std::move(options.processes),
                                           spins);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& failure) {
    throw CommError(fmt::format("connecting the ranks on {}: {}", describe(options.info), failure.what()));
  }
}

}  // namespace tessera
