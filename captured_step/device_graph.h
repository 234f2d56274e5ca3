#pragma once
// DeviceGraph: work of a device that is recorded once and runs again in one launch.

#include <c10/core/Device.h>

#include <memory>

namespace tessera {

/// Thread safety: one thread at a time.
class DeviceGraph {
 public:
  DeviceGraph() = default;
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;
  virtual ~DeviceGraph() = default;

  /// Begins to record, instead of running it, the work of the current stream and of streams that wait for it. Memory
  /// that is allocated meanwhile stays the graph's.
  virtual void begin() = 0;
  /// Ends the recording. Throws if work of a stream does not lead back to the current one.
  virtual void end() = 0;
  /// Ends a recording that failed.
  virtual void abandon() noexcept = 0;
  /// Runs the work on the current stream.
  virtual void replay() = 0;
};

/// Throws NotImplementedError for a device that has no graphs.
std::unique_ptr<DeviceGraph> make_device_graph(c10::Device device);

/// Makes the graphs of simulated GPUs, which tests set.
using DeviceGraphMaker = std::unique_ptr<DeviceGraph> (*)();
void set_device_graph_maker(DeviceGraphMaker maker);

}  // namespace tessera
