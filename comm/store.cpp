#include "comm/store.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/error.h"
#include "comm/listen_socket.h"

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

c10::intrusive_ptr<c10d::Store> connect(const StoreOptions& options) {
  c10d::TCPStoreOptions tcp;
  tcp.port = static_cast<uint16_t>(options.port);
  tcp.isServer = options.rank == 0;
  tcp.numWorkers = options.world_size;
  tcp.timeout = options.timeout;
  if (tcp.isServer) {
    tcp.masterListenFd = take_listen_socket(options.port);
  }
  try {
    auto store = c10::make_intrusive<c10d::TCPStore>(options.address, tcp);
    // Only the server waits for the others. Where it waits in vain it goes, and what the others have is of no use.
    if (tcp.isServer) {
      store->set(kAllConnected, {});
    } else {
      store->wait({kAllConnected});
    }
    return store;
  } catch (const std::exception& failure) {
    throw CommError(fmt::format(
        "init_process_group: rank {} of {} could not {} at {}:{} within {} ms ({}); check MASTER_ADDR and MASTER_PORT "
        "and that every rank was started",
        options.rank, options.world_size, tcp.isServer ? "gather the other ranks" : "reach rank 0", options.address,
        options.port, options.timeout.count(), first_line(failure.what())));
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
