#include "comm/launch/rendezvous.h"

#include <fmt/format.h>
#include <unistd.h>

#include <exception>
#include <map>
#include <random>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/launch/host_process.h"
#include "comm/launch/job_store.h"

namespace tessera {

namespace {

using std::chrono::milliseconds;

constexpr const char* kJob = "job";
constexpr const char* kAllConnected = "all_connected";
constexpr const char* kGaveUp = "gave_up";
constexpr const char* kOtherSecret = "other_secret";
/// Precedes an identity, because a store does not distinguish an empty value from an absent one.
constexpr const char* kJobPrefix = "job ";

std::string describe_job(const std::string& job) {
  return job.empty() ? "a job without an identity" : fmt::format("job {:?}", job);  // another job's text is untrusted
}

/// Describes the entry of the key "job".
std::string describe_entry(const std::string& entry) {
  return entry.starts_with(kJobPrefix) ? describe_job(entry.substr(std::string(kJobPrefix).size())) : "no job of ranks";
}

/// Returns a text that identifies this process uniquely.
const std::string& process_mark() {
  static const std::string mark = [] {
    std::random_device random;
    return fmt::format("{} {:08x}{:08x}", to_text(this_process()), random(), random());
  }();
  return mark;
}

std::string seat_key(int world_size, int rank) {
  return fmt::format("seat/{}/{}", world_size, rank);
}

std::string seat_key(const StoreOptions& options, int rank) {
  return seat_key(options.world_size, rank);
}

/// Returns a key that is set while the rank waits for the others.
std::string taken_key(const StoreOptions& options, int rank) {
  return seat_key(options, rank) + "/taken";
}

/// Returns the result of `call`, and turns an untrusted value into a RendezvousError.
template <class Call>
auto trusting(const StoreOptions& options, Call call) {
  try {
    return call();
  } catch (const UntrustedValue& value) {
    throw RendezvousError(fmt::format(
        "init_process_group: rank {} of {}: {}; if another job meets there, give this one another MASTER_PORT",
        options.rank, options.world_size, value.what()));
  }
}

/// Publishes or checks the job. Rank 0, which serves the store, publishes it; if a launcher serves the store, the first
/// rank 0 does. Another job's name is reported whatever its secret. A rank of this job with another secret notifies
/// rank 0.
void check_job(c10d::Store& store, const StoreOptions& options) {
  const std::string own = kJobPrefix + options.job;
  const auto check = [&](const std::string& here) {
    TESSERA_CHECK(
        RendezvousError, here == own,
        "init_process_group: {} meets at {}:{}, and this is rank {} of {} of {}; give each job a MASTER_PORT of "
        "its own",
        describe_entry(here), options.address, options.port, options.rank, options.world_size,
        describe_job(options.job));
  };
  try {
    check(options.rank == 0 ? store.compareSet(kJob, std::string(), own) : store.get_to_str(kJob));
  } catch (const UntrustedValue& value) {
    check(value.text());
    store.set(kOtherSecret, std::to_string(options.rank));
    throw;
  }
}

/// Returns the last rank that found a different secret. Its number is not trusted.
std::string who_has_other_secret(c10d::Store& store) {
  constexpr size_t kMostDigits = 9;
  std::string number;
  try {
    number = store.get_to_str(kOtherSecret);
  } catch (const UntrustedValue& value) {
    number = value.text();
  }
  const bool is_number =
      !number.empty() && number.size() <= kMostDigits && number.find_first_not_of("0123456789") == std::string::npos;
  return is_number ? "rank " + number : "a process";
}

/// Assigns each rank's seat to one process, which may take it again. A rank that was started twice, or one of another
/// job without an identity, does not mix with those that have met.
void take_seat(c10d::Store& store, const StoreOptions& options) {
  const std::string holder = store.compareSet(seat_key(options, options.rank), std::string(), process_mark());
  TESSERA_CHECK(RendezvousError, holder == process_mark(),
                "init_process_group: another process is rank {} of {} at {}:{} already; if another job meets there, "
                "give this one another MASTER_PORT, else start each rank once",
                options.rank, options.world_size, options.address, options.port);
  store.set(taken_key(options, options.rank), std::string());
}

/// Checks whether ranks of this host that have arrived still run.
class Attendance {
 public:
  Attendance(c10d::Store& store, const StoreOptions& options) : store_(store), options_(options) {}

  /// Throws RendezvousError if one has died.
  void look() {
    TESSERA_CHECK(
        RendezvousError, !store_.check({kOtherSecret}),
        "init_process_group: {} has come to {}:{} with another {} than rank 0, which has {}, or with none; set "
        "the same on all ranks",
        who_has_other_secret(store_), options_.address, options_.port, kSecretVariable,
        options_.secret ? "one" : "none");
    for (int rank = 1; rank < options_.world_size; ++rank) {
      if (!seats_.contains(rank) && store_.check({taken_key(options_, rank)})) {
        seats_.emplace(rank, parse_process(store_.get_to_str(seat_key(options_, rank))));
      }
    }
    for (const auto& [rank, process] : seats_) {
      TESSERA_CHECK(RendezvousError, !has_died(process, own_) || !store_.check({taken_key(options_, rank)}),
                    "init_process_group: rank {} of {} (pid {}) has died before all ranks had met at {}:{}", rank,
                    options_.world_size, process.pid, options_.address, options_.port);
    }
  }

 private:
  c10d::Store& store_;
  const StoreOptions& options_;
  const HostProcess own_ = this_process();
  std::map<int, HostProcess> seats_;  // of ranks that have arrived
};

void gather_others(c10d::Store& store, const StoreOptions& options) {
  std::vector<std::string> keys, seats;
  keys.reserve(static_cast<size_t>(options.world_size));
  seats.reserve(static_cast<size_t>(options.world_size));
  for (int rank = 0; rank < options.world_size; ++rank) {
    keys.push_back(taken_key(options, rank));
    seats.push_back(seat_key(options, rank));
  }
  Attendance attendance(store, options);
  try {
    trusting(options, [&] {
      wait_for_keys(store, keys, options.timeout, [&] { attendance.look(); });
      store.multiGet(seats);  // verifies values; the existence of keys is not authenticated
    });
  } catch (const RendezvousError& failure) {
    store.set(kGaveUp, std::string(failure.what()));
    std::this_thread::sleep_for(milliseconds(500));  // time for the others to read it, before the server ends
    store.deleteKey(kGaveUp);
    store.deleteKey(kOtherSecret);
    throw;
  }
  store.set(kAllConnected, std::to_string(options.world_size));
}

/// Returns rank 0's message after all ranks have taken their seats. A rank that times out gives up its seat. Otherwise
/// a store that outlives rank 0 would count it among those that have met, and rank 0's next attempt would be the
/// second, but this rank's the first.
std::string wait_for_all(c10d::Store& store, const StoreOptions& options) {
  const auto look = [&] {
    if (store.check({kGaveUp})) {
      throw RendezvousError(store.get_to_str(kGaveUp));
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
  return store.get_to_str(kAllConnected);  // if the wait timed out, rank 0 saw this rank just before
}

void meet_trusting(c10d::Store& store, const StoreOptions& options) {
  check_job(store, options);
  take_seat(store, options);
  if (options.rank == 0) {
    gather_others(store, options);
    return;
  }
  const std::string met = wait_for_all(store, options);
  TESSERA_CHECK(RendezvousError, met == std::to_string(options.world_size),
                "init_process_group: {} ranks have met at {}:{}, and this is rank {} of {}; if another job meets "
                "there, give this one another MASTER_PORT",
                met, options.address, options.port, options.rank, options.world_size);
}

}  // namespace

void rendezvous(c10d::Store& store, const StoreOptions& options) {
  trusting(options, [&] { meet_trusting(store, options); });
}

void SeatWatch::look() {
  if (!is_read_) {
    is_read_ = true;
    auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(&store_);
    c10d::Store& store = prefixed == nullptr ? store_ : *prefixed->getUnderlyingStore();
    std::vector<std::string> keys;
    keys.reserve(static_cast<size_t>(world_size_));
    for (int rank = 0; rank < world_size_; ++rank) {
      keys.push_back(seat_key(world_size_, rank));
    }
    if (store.check(keys)) {
      own_ = this_process();
      for (const std::string& key : keys) {
        processes_.push_back(parse_process(store.get_to_str(key)));
      }
    }
  }
  for (size_t rank = 0; rank < processes_.size(); ++rank) {
    TESSERA_CHECK(RendezvousError, !has_died(processes_[rank], own_), "rank {} (pid {}) has died", rank,
                  processes_[rank].pid);
  }
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
    JobStore store(address, tcp, "", /*secret=*/std::nullopt);
    return store.check({kJob}) ? describe_entry(store.get_to_str(kJob)) : "";
  } catch (const UntrustedValue& value) {
    return describe_entry(value.text());
  } catch (const std::exception&) {
    return "";
  }
}

}  // namespace tessera
