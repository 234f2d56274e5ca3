#pragma once
// State of the simulated GPUs: streams, events and memory, for the device guard and the ops.

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <pthread.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "testing/simulated_gpu/device_memory.h"
#include "testing/simulated_gpu/stream_clocks.h"

namespace tessera::simulated_gpu {

/// Memory that an op reads or writes.
struct TouchedBytes {
  const void* device_address = nullptr;
  size_t bytes = 0;
  bool writes = false;
};

/// A mutex that spins briefly before it sleeps. Ranks that are threads take it in every op, for a very short time.
class SpinningMutex {
 public:
  void lock() { pthread_mutex_lock(&mutex_); }
  void unlock() { pthread_mutex_unlock(&mutex_); }

 private:
  pthread_mutex_t mutex_ = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP;
};

/// Thread safety: any thread.
class GpuState {
 public:
  static GpuState& instance();

  c10::Stream new_stream(c10::DeviceIndex device);

  Clock record(const c10::Stream& stream);
  void wait(const c10::Stream& stream, const Clock& event);
  void host_waits(const Clock& event, const std::string& place);
  void host_waits_for(const c10::Stream& stream, const std::string& place);
  void host_waits_for_device(c10::DeviceIndex device, const std::string& place);
  std::vector<std::string> waits();
  void forget_waits();

  /// Launches work on `stream`. Throws Error if this or earlier work violates a rule of simulated_gpu.h.
  void launch(const c10::Stream& stream, const char* op, const std::vector<TouchedBytes>& touched);

  /// Delays what the last work on `stream` wrote at `host_address` until the host has waited. Before, bytes are 0xff.
  void deliver_later(const c10::Stream& stream, void* host_address, size_t bytes);
  /// Delivers what is done before the next work of `stream`.
  void deliver_for(const c10::Stream& stream);
  /// Drops deliveries to memory that is freed.
  void drop_deliveries(const void* host_address, size_t bytes);

  void* allocate(size_t bytes, const c10::Stream& stream);
  void free(void* device_address) noexcept;
  void record_stream(const void* device_address, const c10::Stream& stream);
  void* host_address(const void* device_address) const { return memory_.host_address(device_address); }

  /// Returns what was found and not yet thrown, or "".
  std::string take_fault();

 private:
  struct Delivery {
    Moment moment;
    char* to;
    std::string bytes;
  };

  size_t stream_number(const c10::Stream& stream);
  template <class IsDue>
  void deliver(const IsDue& is_due);
  void deliver_to_host();

  SpinningMutex mutex_;
  StreamClocks clocks_;
  DeviceMemory memory_;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, size_t> numbers_;
  c10::StreamId next_id_ = 1;
  std::vector<Delivery> deliveries_;
  std::vector<std::string> waits_;
  std::string fault_;
};

}  // namespace tessera::simulated_gpu
