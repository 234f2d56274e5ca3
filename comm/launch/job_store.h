#pragma once
// A job's connection to the store of its rank 0, whose every call ends, and whose values are known to be the job's.

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "base/error.h"
#include "comm/launch/job_secret.h"

namespace tessera {

/// The store's server has gone: rank 0, say, has ended or has given up on the others.
class StoreEnded : public CommError {
 public:
  using CommError::CommError;
};

/// A value of the store that no rank with this one's secret has written for its key.
class UntrustedValue : public CommError {
 public:
  UntrustedValue(const std::string& what, std::string text) : CommError(what), text_(std::move(text)) {}
  /// Text of the value, which is not verified, for error messages.
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

/// A TCPStore. Calls to a server that says nothing throw at the time-out, as waits for keys do, and StoreEnded is
/// thrown where the connection has ended. A wait polls, and so leaves the connection to other threads' calls.
///
/// With a secret each value is stored with a tag, and UntrustedValue is thrown where one is read whose tag is wrong or
/// missing; without a secret, where it has a tag. A stranger may change what has none: which keys there are, the
/// counters of add(), the lengths of queues. With a secret, an empty value that compareSet() expects stands for an
/// absent key alone. Thread safety: any number of threads.
class JobStore final : public c10d::Store {
 public:
  /// Connects, and serves the store where the options say so; `server`: who does it, for messages. Throws what TCPStore
  /// throws, and CommError when the server has said nothing within the options' time-out; the connection is left to a
  /// thread that ends with it then.
  JobStore(const std::string& address, const c10d::TCPStoreOptions& options, std::string server,
           std::optional<JobSecret> secret);

  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const StoreValue& value) override;
  StoreValue compareSet(const std::string& key, const StoreValue& expected, const StoreValue& desired) override;
  StoreValue get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  const std::chrono::milliseconds& getTimeout() const noexcept override;
  void setTimeout(const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const StoreValue& value) override;
  std::vector<StoreValue> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys, const std::vector<StoreValue>& values) override;
  bool hasExtendedApi() const override;
  void queuePush(const std::string& key, const StoreValue& value) override;
  StoreValue queuePop(const std::string& key, bool block) override;
  int64_t queueLen(const std::string& key) override;

  using c10d::Store::compareSet;
  using c10d::Store::set;

 private:
  template <class Call>
  auto guarded(Call call);
  /// As the store has it, and back.
  StoreValue sealed(const std::string& key, const StoreValue& value) const;
  StoreValue opened(const std::string& key, StoreValue stored) const;

  const std::string address_;
  const c10d::TCPStoreOptions options_;
  const std::string server_;
  const std::optional<JobSecret> secret_;
  c10::intrusive_ptr<c10d::TCPStore> tcp_;
  std::vector<int> sockets_;  // to the server; tcp_ owns them
  std::atomic<bool> is_silent_ = false;
};

/// Waits until the store has all of `keys`, and calls `look`, which may throw, every 200 ms meanwhile. Throws
/// c10::DistStoreError at the time-out.
void wait_for_keys(c10d::Store& store, const std::vector<std::string>& keys, std::chrono::milliseconds timeout,
                   const std::function<void()>& look);

}  // namespace tessera
