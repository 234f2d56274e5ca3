#pragma once
// Store of a job: a TCPStore with a timeout for every call and, with a secret, authenticated values.

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

class StoreEnded : public CommError {  // the server has gone, for example because rank 0 has ended
 public:
  using CommError::CommError;
};

class UntrustedValue : public CommError {  // a value that no rank with this secret has written for its key
 public:
  UntrustedValue(const std::string& what, std::string text) : CommError(what), text_(std::move(text)) {}
  const std::string& text() const { return text_; }  // unverified, for error messages

 private:
  std::string text_;
};

/// A TCPStore with authenticated values. Its calls end at the timeout. They throw:
/// - CommError if the server does not answer within the timeout.
/// - StoreEnded if the connection has ended.
/// - UntrustedValue for a value with a wrong or missing tag or, without a secret, with a tag.
/// Waits poll, so that other threads can use the connection. Which keys exist, counters of add() and lengths of queues
/// are not authenticated. In compareSet() with a secret, an empty `expected` means an absent key. Thread-safe.
class JobStore final : public c10d::Store {
 public:
  /// Connects, and serves the store if `options` say so. `server` names the server in messages. Throws TCPStore's
  /// errors, and CommError if the server does not answer in time; a thread then keeps the connection until it ends.
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
  StoreValue sealed(const std::string& key, const StoreValue& value) const;  // adds the tag
  StoreValue opened(const std::string& key, StoreValue stored) const;        // checks and removes it

  const std::string address_;
  const c10d::TCPStoreOptions options_;
  const std::string server_;
  const std::optional<JobSecret> secret_;
  c10::intrusive_ptr<c10d::TCPStore> tcp_;
  std::vector<int> sockets_;  // to the server, owned by tcp_
  std::atomic<bool> is_silent_ = false;
};

class WaitFault : public CommError {  // see set_wait_fault()
 public:
  using CommError::CommError;
};

/// Sets a function that returns why this process's waits for other ranks must end, or "" while they need not. An empty
/// function removes it. Long waits call it five times a second, in any thread.
void set_wait_fault(std::function<std::string()> find);
std::string find_wait_fault();

/// Waits for all `keys` and calls `look`, which may throw, every 200 ms. Throws c10::DistStoreError at the timeout, and
/// WaitFault.
void wait_for_keys(c10d::Store& store, const std::vector<std::string>& keys, std::chrono::milliseconds timeout,
                   const std::function<void()>& look);

}  // namespace tessera
