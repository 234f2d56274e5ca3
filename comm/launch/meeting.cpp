#include "comm/launch/meeting.h"

#include <fmt/format.h>
#include <unistd.h>

#include <exception>
#include <map>
#include <random>
#include <thread>

#include "comm/launch/host_process.h"
#include "comm/launch/job_store.h"

namespace tessera {

namespace {

using std::chrono::milliseconds;

constexpr const char* kJob = "job";
constexpr const char* kAllConnected = "all_connected";
constexpr const char* kGaveUp = "gave_up";
/// In front of an identity: a store does not tell an empty value from none.
constexpr const char* kJobPrefix = "job ";

std::string describe_job(const std::string& job) {
  return job.empty() ? "a job without an identity" : fmt::format("job \"{}\"", job);
}

/// Tells this process from all others, and says which it is.
const std::string& process_mark() {
  static const std::string mark = [] {
    std::random_device random;
    return fmt::format("{} {:08x}{:08x}", to_text(this_process()), random(), random());
  }();
  return mark;
}

std::string seat_key(const StoreOptions& options, int rank) {
  return fmt::format("seat/{}/{}", options.world_size, rank);
}

/// Set while the rank waits for the others.
std::string taken_key(const StoreOptions& options, int rank) {
  return seat_key(options, rank) + "/taken";
}

/// Rank 0, whose store it is, says whose job meets here. Where a launcher serves the store, the first rank 0 does.
void check_job(c10d::Store& store, const StoreOptions& options) {
  const std::string own = kJobPrefix + options.job;
  const std::string here = options.rank == 0 ? store.compareSet(kJob, std::string(), own) : store.get_to_str(kJob);
  TESSERA_CHECK(
      MeetingError, here == own,
      "init_process_group: {} meets at {}:{}, and this is rank {} of {} of {}; give each job a MASTER_PORT of "
      "its own",
      describe_job(here.substr(std::string(kJobPrefix).size())), options.address, options.port, options.rank,
      options.world_size, describe_job(options.job));
}

/// Each rank's seat goes to one process, which may take it again: a rank that was started twice, or one of another job
/// where jobs have no identity, does not mix with those that have met.
void take_seat(c10d::Store& store, const StoreOptions& options) {
  const std::string holder = store.compareSet(seat_key(options, options.rank), std::string(), process_mark());
  TESSERA_CHECK(MeetingError, holder == process_mark(),
                "init_process_group: another process is rank {} of {} at {}:{} already; if another job meets there, "
                "give this one another MASTER_PORT, else start each rank once",
                options.rank, options.world_size, options.address, options.port);
  store.set(taken_key(options, options.rank), std::string());
}

/// Looks whether ranks that have come, and are on this host, still run.
class Attendance {
 public:
  Attendance(c10d::Store& store, const StoreOptions& options) : store_(store), options_(options) {}

  /// Throws MeetingError.
  void look() {
    for (int rank = 1; rank < options_.world_size; ++rank) {
      if (!seats_.contains(rank) && store_.check({taken_key(options_, rank)})) {
        seats_.emplace(rank, parse_process(store_.get_to_str(seat_key(options_, rank))));
      }
    }
    for (const auto& [rank, process] : seats_) {
      TESSERA_CHECK(MeetingError, !has_died(process, own_) || !store_.check({taken_key(options_, rank)}),
                    "init_process_group: rank {} of {} (pid {}) has died before all ranks had met at {}:{}", rank,
                    options_.world_size, process.pid, options_.address, options_.port);
    }
  }

 private:
  c10d::Store& store_;
  const StoreOptions& options_;
  const HostProcess own_ = this_process();
  std::map<int, HostProcess> seats_;  // of those that have come
};

void gather_others(c10d::Store& store, const StoreOptions& options) {
  std::vector<std::string> keys;
  keys.reserve(static_cast<size_t>(options.world_size));
  for (int rank = 0; rank < options.world_size; ++rank) {
    keys.push_back(taken_key(options, rank));
  }
  Attendance attendance(store, options);
  try {
    wait_for_keys(store, keys, options.timeout, [&] { attendance.look(); });
  } catch (const MeetingError& failure) {
    store.set(kGaveUp, std::string(failure.what()));
    std::this_thread::sleep_for(milliseconds(500));  // then the server goes, and with it what the others could read
    store.deleteKey(kGaveUp);
    throw;
  }
  store.set(kAllConnected, std::to_string(options.world_size));
}

/// What rank 0 says when all ranks have taken their seats. A rank that gives up on it leaves its own, since a store
/// that outlives rank 0 would count it among those that have met, and rank 0's next attempt would be the second, this
/// rank's the first.
std::string wait_for_all(c10d::Store& store, const StoreOptions& options) {
  const auto look = [&] {
    if (store.check({kGaveUp})) {
      throw MeetingError(store.get_to_str(kGaveUp));
    }
  };
  try {
    wait_for_keys(store, {kAllConnected}, options.timeout, look);
  } catch (const std::exception&) {
    store.deleteKey(taken_key(options, options.rank));
    if (!store.check({kAllConnected})) {
      throw;
    }
  }
  return store.get_to_str(kAllConnected);  // if the wait timed out, rank 0 saw this one just before
}

}  // namespace

void meet(c10d::Store& store, const StoreOptions& options) {
  check_job(store, options);
  take_seat(store, options);
  if (options.rank == 0) {
    gather_others(store, options);
    return;
  }
  const std::string met = wait_for_all(store, options);
  TESSERA_CHECK(MeetingError, met == std::to_string(options.world_size),
                "init_process_group: {} ranks have met at {}:{}, and this is rank {} of {}; if another job meets "
                "there, give this one another MASTER_PORT",
                met, options.address, options.port, options.rank, options.world_size);
}

std::vector<int> absent_ranks(c10d::Store& store, const StoreOptions& options) {
  std::vector<int> absent;
  try {
    for (int rank = 0; rank < options.world_size; ++rank) {
      if (rank != options.rank && !store.check({taken_key(options, rank)})) {
        absent.push_back(rank);
      }
    }
  } catch (const std::exception&) {
    return {};
  }
  return absent;
}

std::string find_job_at(const std::string& address, int port) {
  try {
    c10d::TCPStoreOptions tcp;
    tcp.port = static_cast<uint16_t>(port);
    tcp.timeout = std::chrono::seconds(1);
    JobStore store(address, tcp, "");
    return store.check({kJob}) ? describe_job(store.get_to_str(kJob).substr(std::string(kJobPrefix).size())) : "";
  } catch (const std::exception&) {
    return "";
  }
}

}  // namespace tessera
