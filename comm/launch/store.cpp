#include "comm/launch/store.h"

#include <fmt/ranges.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/error.h"
#include "comm/launch/listen_socket.h"

namespace tessera {

namespace {

constexpr const char* kAllConnected = "all_connected";

/// 0: none that can be told.
int bound_port(int socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return 0;
  }
  switch (address.ss_family) {
    case AF_INET:
      return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
    case AF_INET6:
      return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
    default:
      return 0;
  }
}

// Only the first store of a process at the launcher's port can take the socket over: it is closed with that store.
std::optional<int> take_listen_socket(int port) {
  static std::atomic<bool> taken{false};
  const char* text = std::getenv(kListenSocketVariable);
  if (text == nullptr || bound_port(std::atoi(text)) != port || taken.exchange(true)) {
    return std::nullopt;
  }
  return std::atoi(text);
}

std::string first_line(std::string text) {
  return text.substr(0, text.find('\n'));
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// torchrun's agent serves one store to all attempts of a job, and a dead one's keys stay there.
c10::intrusive_ptr<c10d::Store> store_of_attempt(c10::intrusive_ptr<c10d::Store> store, const StoreOptions& options) {
  const bool agent_serves = variable("TORCHELASTIC_USE_AGENT_STORE") == "True" &&
                            variable("MASTER_ADDR") == options.address &&
                            variable("MASTER_PORT") == std::to_string(options.port);
  if (!agent_serves) {
    return store;
  }
  const std::string prefix =
      fmt::format("tessera/attempt_{}/{}", variable("TORCHELASTIC_RESTART_COUNT"), options.world_size);
  return c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(store));
}

/// Tells this process from all others.
const std::string& process_mark() {
  static const std::string mark = [] {
    std::random_device random;
    return fmt::format("{}-{:08x}{:08x}", getpid(), random(), random());
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

/// Each rank's seat goes to one process, which may take it again. So ranks of another job that comes to this address,
/// whose own rank 0 could not listen there, do not mix with those that have met.
void take_seat(c10d::Store& store, const StoreOptions& options) {
  const std::string key = seat_key(options, options.rank);
  const std::string holder = store.compareSet(key, std::string(), process_mark());
  TESSERA_CHECK(CommError, holder == process_mark(),
                "init_process_group: another process is rank {} of {} at {}:{} already; if another job meets there, "
                "give this one another MASTER_PORT, else start each rank once",
                options.rank, options.world_size, options.address, options.port);
  store.set(taken_key(options, options.rank), std::string());
}

/// What rank 0 says when all ranks have taken their seats. A rank that gives up on it leaves its own, since a store
/// that outlives rank 0 would count it among those that have met, and rank 0's next attempt would be the second, this
/// rank's the first.
std::string wait_for_all(c10d::Store& store, const StoreOptions& options) {
  try {
    return store.get_to_str(kAllConnected);
  } catch (const std::exception&) {
    store.deleteKey(taken_key(options, options.rank));
    if (!store.check({kAllConnected})) {
      throw;
    }
  }
  return store.get_to_str(kAllConnected);  // rank 0 saw this one just before
}

/// Rank 0 waits for the others. Where it waits in vain its server goes, and what the others have is of no use.
void gather_ranks(c10d::Store& store, const StoreOptions& options) {
  const std::string world_size = std::to_string(options.world_size);
  if (options.rank == 0) {
    std::vector<std::string> keys;
    keys.reserve(static_cast<size_t>(options.world_size));
    for (int rank = 0; rank < options.world_size; ++rank) {
      keys.push_back(taken_key(options, rank));
    }
    store.wait(keys);
    store.set(kAllConnected, world_size);
    return;
  }
  const std::string met = wait_for_all(store, options);
  TESSERA_CHECK(CommError, met == world_size,
                "init_process_group: {} ranks have met at {}:{}, and this is rank {} of {}; if another job meets "
                "there, give this one another MASTER_PORT",
                met, options.address, options.port, options.rank, options.world_size);
}

/// The other ranks that have not taken their seats; none if the store, which may end with rank 0, cannot tell.
std::vector<int> absent_ranks(const c10::intrusive_ptr<c10d::Store>& store, const StoreOptions& options) {
  std::vector<int> absent;
  try {
    for (int rank = 0; store && rank < options.world_size; ++rank) {
      if (rank != options.rank && !store->check({taken_key(options, rank)})) {
        absent.push_back(rank);
      }
    }
  } catch (const std::exception&) {
    return {};
  }
  return absent;
}

std::string describe_absent(const std::vector<int>& absent) {
  constexpr size_t kNamed = 16;
  const std::vector<int> named(absent.begin(),
                               absent.begin() + static_cast<std::ptrdiff_t>(std::min(absent.size(), kNamed)));
  return fmt::format("rank{} {}{} did not come", absent.size() == 1 ? "" : "s", fmt::join(named, ", "),
                     absent.size() > kNamed ? fmt::format(" and {} more", absent.size() - kNamed) : "");
}

c10::intrusive_ptr<c10d::Store> connect(const StoreOptions& options) {
  c10d::TCPStoreOptions tcp;
  tcp.port = static_cast<uint16_t>(options.port);
  tcp.isServer = options.rank == 0;
  tcp.timeout = options.timeout;
  if (tcp.isServer) {
    tcp.masterListenFd = take_listen_socket(options.port);
  }
  c10::intrusive_ptr<c10d::Store> store;
  try {
    store = store_of_attempt(c10::make_intrusive<c10d::TCPStore>(options.address, tcp), options);
    take_seat(*store, options);
    gather_ranks(*store, options);
    return store;
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& failure) {
    const auto absent = absent_ranks(store, options);
    const char* step = options.rank == 0 ? "gather the other ranks" : "reach rank 0";
    if (options.rank != 0 && !absent.empty() && absent[0] != 0) {
      step = "meet the other ranks";
    }
    throw CommError(fmt::format(
        "init_process_group: rank {} of {} could not {} at {}:{} within {} ms ({}); check MASTER_ADDR and MASTER_PORT "
        "and that every rank was started",
        options.rank, options.world_size, step, options.address, options.port, options.timeout.count(),
        absent.empty() ? first_line(failure.what()) : describe_absent(absent)));
  }
}

/// Rank 0, in whose process the store may be, returns after the others: it may be about to fail and end.
void leave_in_order(c10d::Store& store, const std::string& name, int rank, int world_size) {
  const std::string count = name + "/left", all = name + "/all_left";
  if (rank == 0 && world_size > 1) {
    store.wait({all});
  } else if (rank != 0 && store.add(count, 1) == world_size - 1) {
    store.set(all, "1");
  }
}

}  // namespace

c10::intrusive_ptr<c10d::Store> connect_store(const StoreOptions& options) {
  struct Connection {
    std::mutex mutex;  // its own: ranks that are threads of one process wait for each other here
    c10::intrusive_ptr<c10d::Store> store;
  };
  static std::mutex mutex;
  static auto* connections = new std::map<std::string, Connection>();  // outlives every group
  const std::string key =
      fmt::format("{}:{} {} of {}", options.address, options.port, options.rank, options.world_size);
  std::unique_lock lock(mutex);
  Connection& connection = (*connections)[key];
  lock.unlock();
  const std::lock_guard own_lock(connection.mutex);
  if (!connection.store) {
    connection.store = connect(options);
  }
  connection.store->setTimeout(options.timeout);
  return connection.store;
}

std::vector<std::string> exchange_texts(c10d::Store& store, const std::string& name, int rank, int world_size,
                                        const std::string& text) {
  store.set(fmt::format("{}/{}", name, rank), text);
  std::vector<std::string> keys;
  keys.reserve(static_cast<size_t>(world_size));
  for (int other = 0; other < world_size; ++other) {
    keys.push_back(fmt::format("{}/{}", name, other));
  }
  std::vector<std::string> texts;
  for (const std::vector<uint8_t>& entry : store.multiGet(keys)) {
    texts.emplace_back(entry.begin(), entry.end());
  }
  leave_in_order(store, name, rank, world_size);
  return texts;
}

c10::intrusive_ptr<c10d::Store> local_store() {
  return c10::make_intrusive<c10d::HashStore>();
}

}  // namespace tessera
