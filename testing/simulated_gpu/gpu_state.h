#pragma once
// State of the simulated GPUs: streams, events and memory, for the device guard and the ops.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <pthread.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
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

/// Position of an event in the streams' work, and the graph that was being captured on its stream; 0: none.
struct EventPlace {
  Clock clock;
  size_t graph = 0;
};

/// Work in a graph: the accessed bytes, and the kernel.
struct GraphWork {
  std::string op;
  std::vector<TouchedBytes> touched;
  std::function<void()> run;
};

struct Graph {
  size_t number = 0;
  std::vector<GraphWork> work = {};
};

/// A mutex that spins briefly before it sleeps. Ranks that are threads take it in every op, for a very short time.
class SpinningMutex {
 public:
  void lock() { pthread_mutex_lock(&mutex_); }
  void unlock() { pthread_mutex_unlock(&mutex_); }

 private:
  pthread_mutex_t mutex_ = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP;
};

/// State of all simulated GPUs. Thread safety: any thread.
class GpuState {
 public:
  static GpuState& instance();

  c10::Stream new_stream(c10::DeviceIndex device);

  EventPlace record(const c10::Stream& stream);
  void wait(const c10::Stream& stream, const EventPlace& event);
  void host_waits(const EventPlace& event, const std::string& place);
  void host_waits_for(const c10::Stream& stream, const std::string& place);
  void host_waits_for_device(c10::DeviceIndex device, const std::string& place);
  std::vector<std::string> waits();
  void forget_waits();

  /// Launches work on `stream`. Throws Error if this or earlier work violates a rule of simulated_gpu.h.
  void launch(const c10::Stream& stream, const char* op, const std::vector<TouchedBytes>& touched);

  /// Captures a graph on `stream`, with the rules of CUDA. Streams join by waiting for its events, and the host waits
  /// for nothing. Work runs during the capture, but its writes are undone at the end.
  void begin_capture(const c10::Stream& stream);
  bool is_capturing();
  void add_graph_work(GraphWork work);
  /// Throws Error if the first stream does not wait for the work of a stream that has joined.
  Graph end_capture();
  void abandon_capture();
  void replay(const Graph& graph, const c10::Stream& stream);

  /// Delays the writes of the last work on `stream` at `host_address` until the host has waited. Before, bytes are
  /// 0xff.
  void deliver_later(const c10::Stream& stream, void* host_address, size_t bytes);
  /// Delivers writes that are complete before the next work of `stream`.
  void deliver_for(const c10::Stream& stream);
  /// Drops deliveries to memory that is freed.
  void drop_deliveries(const void* host_address, size_t bytes);

  void* allocate(size_t bytes, const c10::Stream& stream);
  void free(void* device_address) noexcept;
  void record_stream(const void* device_address, const c10::Stream& stream);
  void* host_address(const void* device_address) const { return memory_.host_address(device_address); }

  /// Returns the errors found and not yet thrown, or "".
  std::string take_fault();

 private:
  struct Delivery {
    Moment moment;
    char* to;
    std::string bytes;
  };

  struct Capture {
    size_t origin;
    std::set<size_t> streams;
    std::string memory;  // before it
    at::Tensor generator;
    Graph graph;
  };

  size_t stream_number(const c10::Stream& stream);
  void launch(size_t stream, const char* op, const std::vector<TouchedBytes>& touched, size_t graph);
  void check_host_may_wait(const std::string& place) const;
  Graph finish_capture();
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
  std::optional<Capture> capture_;
  size_t graphs_ = 0;
  std::string fault_;
};

}  // namespace tessera::simulated_gpu
