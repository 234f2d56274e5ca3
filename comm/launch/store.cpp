#include "comm/launch/store.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/error.h"
#include "comm/launch/job_store.h"
#include "comm/launch/listen_socket.h"
#include "comm/launch/regroup.h"
#include "comm/launch/rendezvous.h"

namespace tessera {

namespace {

std::string first_line(std::string text) {
  return text.substr(0, text.find('\n'));
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// Returns the launcher that serves the store, or "".
std::string serving_launcher(const StoreOptions& options) {
  if (variable("MASTER_ADDR") != options.address || variable("MASTER_PORT") != std::to_string(options.port)) {
    return "";
  }
  return variable(kRegroupVariable) == "1"                    ? "the launcher"
         : variable("TORCHELASTIC_USE_AGENT_STORE") == "True" ? "torchrun's agent"
                                                              : "";
}

std::string describe_absent(const std::vector<int>& absent) {
  constexpr size_t kNamed = 16;
  const std::vector<int> named(absent.begin(),
                               absent.begin() + static_cast<std::ptrdiff_t>(std::min(absent.size(), kNamed)));
  return fmt::format("rank{} {}{} did not come", absent.size() == 1 ? "" : "s", fmt::join(named, ", "),
                     absent.size() > kNamed ? fmt::format(" and {} more", absent.size() - kNamed) : "");
}

/// Returns rank 0's serving socket; none: libtorch listens on all interfaces.
std::optional<int> find_listen_socket(const StoreOptions& options) {
  if (const auto launchers = take_listen_socket(options.port)) {
    return launchers;
  }
  try {
    return listen_at(options.address, options.port);
  } catch (const CommError& failure) {
    const std::string job = find_job_at(options.address, options.port);
    throw CommError(fmt::format("{}{}", failure.what(), job.empty() ? "" : fmt::format("; {} meets there", job)));
  }
}

c10::intrusive_ptr<c10d::Store> open_store(const StoreOptions& options) {
  const std::string launcher = serving_launcher(options);
  c10d::TCPStoreOptions tcp;
  tcp.port = static_cast<uint16_t>(options.port);
  tcp.isServer = options.rank == 0 && launcher.empty();
  tcp.timeout = options.timeout;
  if (tcp.isServer) {
    tcp.masterListenFd = find_listen_socket(options);
  }
  std::optional<JobSecret> secret;
  if (options.secret) {
    secret.emplace(*options.secret, options.job);
  }
  c10::intrusive_ptr<c10d::Store> store =
      c10::make_intrusive<JobStore>(options.address, tcp, launcher.empty() ? "rank 0" : launcher, secret);
  if (launcher.empty()) {
    return store;
  }
  // Its store serves all attempts of a job, and keys of a failed one remain.
  const std::string prefix =
      fmt::format("tessera/attempt_{}/{}", variable("TORCHELASTIC_RESTART_COUNT"), options.world_size);
  return c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(store));
}

c10::intrusive_ptr<c10d::Store> connect(const StoreOptions& options) {
  c10::intrusive_ptr<c10d::Store> store;
  try {
    store = open_store(options);
    rendezvous(*store, options);
    return store;
  } catch (const RendezvousError&) {
    throw;
  } catch (const WaitFault&) {
    throw;
  } catch (const std::exception& failure) {
    const auto absent = store ? absent_ranks(*store, options) : std::vector<int>();
    const bool rank_0_has_ended = dynamic_cast<const StoreEnded*>(&failure) != nullptr;
    const char* step = options.rank == 0 ? "gather the other ranks" : "reach rank 0";
    if (options.rank != 0 && (rank_0_has_ended || (!absent.empty() && absent[0] != 0))) {
      step = "meet the other ranks";
    }
    throw CommError(fmt::format(
        "init_process_group: rank {} of {} could not {} at {}:{} within {} ms ({}); check MASTER_ADDR and MASTER_PORT "
        "and that every rank was started",
        options.rank, options.world_size, step, options.address, options.port, options.timeout.count(),
        absent.empty() ? first_line(failure.what()) : describe_absent(absent)));
  }
}

struct RankStore {
  std::mutex mutex;  // a separate one, because ranks that are threads of one process wait for each other here
  c10::intrusive_ptr<c10d::Store> store;
};

struct Connections {
  std::mutex mutex;
  std::map<std::string, RankStore> by_ranks;
};

Connections& connections() {
  static auto* const all = new Connections;  // never destroyed, because it must outlive every group
  return *all;
}

/// Makes rank 0, whose process may serve the store, return last, because it may be about to end.
void leave_in_order(c10d::Store& store, const std::string& name, int rank, int world_size, SeatWatch& watch) {
  const std::string count = name + "/left", all = name + "/all_left";
  if (rank == 0 && world_size > 1) {
    wait_for_keys(store, {all}, store.getTimeout(), [&] { watch.look(); });
  } else if (rank != 0 && store.add(count, 1) == world_size - 1) {
    store.set(all, "1");
  }
}

}  // namespace

c10::intrusive_ptr<c10d::Store> connect_store(const StoreOptions& options) {
  const std::string key =
      fmt::format("{}:{} {} of {}", options.address, options.port, options.rank, options.world_size);
  std::unique_lock lock(connections().mutex);
  RankStore& connection = connections().by_ranks[key];
  lock.unlock();
  const std::lock_guard own_lock(connection.mutex);
  if (!connection.store) {
    connection.store = connect(options);
  }
  connection.store->setTimeout(options.timeout);
  return connection.store;
}

void forget_stores() {
  const std::lock_guard lock(connections().mutex);
  connections().by_ranks.clear();
}

std::vector<std::string> exchange_texts(c10d::Store& store, const std::string& name, int rank, int world_size,
                                        const std::string& text) {
  store.set(fmt::format("{}/{}", name, rank), text);
  std::vector<std::string> keys;
  keys.reserve(static_cast<size_t>(world_size));
  for (int other = 0; other < world_size; ++other) {
    keys.push_back(fmt::format("{}/{}", name, other));
  }
  SeatWatch watch(store, world_size);
  wait_for_keys(store, keys, store.getTimeout(), [&] { watch.look(); });
  std::vector<std::string> texts;
  for (const std::vector<uint8_t>& entry : store.multiGet(keys)) {
    texts.emplace_back(entry.begin(), entry.end());
  }
  leave_in_order(store, name, rank, world_size, watch);
  return texts;
}

c10::intrusive_ptr<c10d::Store> local_store() {
  return c10::make_intrusive<c10d::HashStore>();
}

}  // namespace tessera
