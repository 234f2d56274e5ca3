#include "comm/launch/job_store.h"

#include <c10/util/Exception.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

#include "base/open_files.h"
#include "comm/launch/listen_socket.h"
#include "comm/launch/lost_host.h"

namespace tessera {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

struct Connection {
  c10::intrusive_ptr<c10d::TCPStore> store;
  std::vector<int> sockets;
};

/// Returns the peer's port; 0 if unknown.
int peer_port(int socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return 0;
  }
  return address_port(address);
}

/// Connects. TCPStore does not expose its socket, so this finds new sockets to its port, possibly with those of the
/// job's other stores.
Connection connect_now(const std::string& address, const c10d::TCPStoreOptions& options) {
  const auto before = open_files();
  Connection connection{.store = c10::make_intrusive<c10d::TCPStore>(address, options), .sockets = {}};
  for (const auto& [number, what] : opened_since(before)) {
    if (what.starts_with("socket:") && peer_port(number) == connection.store->getPort()) {
      connection.sockets.push_back(number);
    }
  }
  return connection;
}

/// Connects on a thread, because TCPStore's constructor waits forever for the first answer of a silent server.
Connection connect(const std::string& address, const c10d::TCPStoreOptions& options) {
  constexpr milliseconds kGrace(300);  // time for TCPStore itself to report why it could not connect
  std::promise<Connection> promise;
  auto result = promise.get_future();
  std::thread([address, options, promise = std::move(promise)]() mutable {
    try {
      promise.set_value(connect_now(address, options));
    } catch (...) {
      promise.set_exception(std::current_exception());
    }
  }).detach();
  TESSERA_CHECK(CommError, result.wait_for(options.timeout + kGrace) == std::future_status::ready,
                "what listens there has not answered; it may be another program");
  return result.get();
}

/// Limits how long the system waits for an answer before the call fails.
void limit_calls(const std::vector<int>& sockets, int port, milliseconds timeout) {
  const timeval time = {.tv_sec = timeout.count() / 1000, .tv_usec = timeout.count() % 1000 * 1000};
  for (const int socket : sockets) {
    if (peer_port(socket) == port) {  // otherwise it is closed, and another file has the number
      setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time);
      setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time);
    }
  }
}

bool is_time_out(const c10::Error& failure) {
  return std::string(failure.what_without_backtrace()).find("imeout") != std::string::npos;
}

}  // namespace

JobStore::JobStore(const std::string& address, const c10d::TCPStoreOptions& options, std::string server,
                   std::optional<JobSecret> secret)
    : Store(options.timeout), address_(address), options_(options), server_(std::move(server)), secret_(secret) {
  Connection connection = connect(address, options);
  tcp_ = std::move(connection.store);
  sockets_ = std::move(connection.sockets);
  limit_calls(sockets_, tcp_->getPort(), options.timeout);
  limit_silence(sockets_);
}

/// Adds the server to libtorch's errors about an ended connection, which do not name it.
template <class Call>
auto JobStore::guarded(Call call) {
  const auto server = [&] {
    return fmt::format("{}, which serves the store at {}:{},", server_, address_, tcp_->getPort());
  };
  TESSERA_CHECK(CommError, !is_silent_, "{} did not answer in time before", server());
  try {
    return call();
  } catch (const c10::DistNetworkError& failure) {
    if (is_time_out(failure)) {
      is_silent_ = true;  // a late answer would be taken for the next call's
      throw CommError(fmt::format("{} did not answer within {} ms", server(), getTimeout().count()));
    }
    throw StoreEnded(fmt::format("{} has ended or given up", server()));
  }
}

StoreValue JobStore::sealed(const std::string& key, const StoreValue& value) const {
  return secret_ ? secret_->seal(key, value) : value;
}

StoreValue JobStore::opened(const std::string& key, StoreValue stored) const {
  if (!secret_) {
    if (is_sealed(stored)) {
      throw UntrustedValue(
          fmt::format("the store's key \"{}\" at {}:{} has a value with a tag, and this rank has no {} "
                      "to check it; set the same on all ranks",
                      key, address_, tcp_->getPort(), kSecretVariable),
          unverified_text(stored));
    }
    return stored;
  }
  std::optional<StoreValue> value = secret_->open(key, stored);
  if (!value) {
    throw UntrustedValue(
        fmt::format("the store's key \"{}\" at {}:{} has a value that no rank with this one's {} wrote: another rank "
                    "has another one, or none, or a stranger can reach the port; set the same on all ranks",
                    key, address_, tcp_->getPort(), kSecretVariable),
        unverified_text(stored));
  }
  return std::move(*value);
}

c10::intrusive_ptr<c10d::Store> JobStore::clone() {
  c10d::TCPStoreOptions options = options_;
  options.isServer = false;
  options.masterListenFd = std::nullopt;
  options.port = tcp_->getPort();
  options.timeout = getTimeout();
  return c10::make_intrusive<JobStore>(address_, options, server_, secret_);
}

void JobStore::set(const std::string& key, const StoreValue& value) {
  guarded([&] { tcp_->set(key, sealed(key, value)); });
}

StoreValue JobStore::compareSet(const std::string& key, const StoreValue& expected, const StoreValue& desired) {
  const StoreValue before = expected.empty() ? expected : sealed(key, expected);
  return opened(key, guarded([&] { return tcp_->compareSet(key, before, sealed(key, desired)); }));
}

StoreValue JobStore::get(const std::string& key) {
  wait({key});
  return opened(key, guarded([&] { return tcp_->get(key); }));
}

int64_t JobStore::add(const std::string& key, int64_t value) {
  return guarded([&] { return tcp_->add(key, value); });
}

bool JobStore::deleteKey(const std::string& key) {
  return guarded([&] { return tcp_->deleteKey(key); });
}

bool JobStore::check(const std::vector<std::string>& keys) {
  return guarded([&] { return tcp_->check(keys); });
}

int64_t JobStore::getNumKeys() {
  return guarded([&] { return tcp_->getNumKeys(); });
}

void JobStore::wait(const std::vector<std::string>& keys) {
  wait(keys, getTimeout());
}

void JobStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  wait_for_keys(*this, keys, timeout, [] {});
}

const milliseconds& JobStore::getTimeout() const noexcept {
  return tcp_->getTimeout();
}

void JobStore::setTimeout(const milliseconds& timeout) {
  tcp_->setTimeout(timeout);
  limit_calls(sockets_, tcp_->getPort(), timeout);
}

void JobStore::append(const std::string& key, const StoreValue& value) {
  guarded([&] { tcp_->append(key, sealed(key, value)); });
}

std::vector<StoreValue> JobStore::multiGet(const std::vector<std::string>& keys) {
  wait(keys);
  std::vector<StoreValue> values = guarded([&] { return tcp_->multiGet(keys); });
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = opened(keys.at(i), std::move(values[i]));
  }
  return values;
}

void JobStore::multiSet(const std::vector<std::string>& keys, const std::vector<StoreValue>& values) {
  std::vector<StoreValue> stored = values;
  for (size_t i = 0; i < std::min(keys.size(), values.size()); ++i) {
    stored[i] = sealed(keys[i], values[i]);
  }
  guarded([&] { tcp_->multiSet(keys, stored); });
}

bool JobStore::hasExtendedApi() const {
  return tcp_->hasExtendedApi();
}

void JobStore::queuePush(const std::string& key, const StoreValue& value) {
  guarded([&] { tcp_->queuePush(key, sealed(key, value)); });
}

StoreValue JobStore::queuePop(const std::string& key, bool block) {
  return opened(key, guarded([&] { return tcp_->queuePop(key, block); }));
}

int64_t JobStore::queueLen(const std::string& key) {
  return guarded([&] { return tcp_->queueLen(key); });
}

namespace {

struct FaultFinder {
  std::mutex mutex;
  std::function<std::string()> find;
};

FaultFinder& fault_finder() {
  static auto* const finder = new FaultFinder;  // never destroyed, because threads may outlive statics
  return *finder;
}

}  // namespace

void set_wait_fault(std::function<std::string()> find) {
  const std::lock_guard lock(fault_finder().mutex);
  fault_finder().find = std::move(find);
}

std::string find_wait_fault() {
  std::unique_lock lock(fault_finder().mutex);
  const auto find = fault_finder().find;
  lock.unlock();
  return find ? find() : "";
}

void wait_for_keys(c10d::Store& store, const std::vector<std::string>& keys, milliseconds timeout,
                   const std::function<void()>& look) {
  constexpr std::chrono::microseconds kShortestPause(100), kLongestPause(20000);
  constexpr milliseconds kLookInterval(200);
  const Clock::time_point start = Clock::now();
  Clock::time_point next_look = start + kLookInterval;
  while (!store.check(keys)) {
    const Clock::time_point now = Clock::now();
    const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(now - start);
    if (timeout != c10d::Store::kNoTimeout && waited >= timeout) {
      C10_THROW_ERROR(DistStoreError,
                      fmt::format("wait timeout after {} ms for the store's key \"{}\"{}", timeout.count(),
                                  keys.empty() ? "" : keys[0], keys.size() > 1 ? " and others" : ""));
    }
    if (now >= next_look) {
      next_look = now + kLookInterval;
      look();
      const std::string fault = find_wait_fault();
      TESSERA_CHECK(WaitFault, fault.empty(), "waiting for the store's key \"{}\": {}", keys.empty() ? "" : keys[0],
                    fault);
    }
    std::this_thread::sleep_for(std::clamp(waited / 8, kShortestPause, kLongestPause));
  }
}

}  // namespace tessera
