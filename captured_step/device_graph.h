#pragma once
// DeviceGraph: device work that is recorded once and replayed with one launch.

#include <c10/core/Device.h>

#include <memory>

namespace tessera {

/// Interface of a graph. Thread safety: one thread at a time.
class DeviceGraph {
 public:
  DeviceGraph() = default;
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;
  virtual ~DeviceGraph() = default;

  /// Starts recording, instead of running, the work of the current stream and of streams that wait for it. The graph
  /// keeps memory that is allocated meanwhile.
  virtual void begin() = 0;
  /// Ends the recording. Throws if the work of some stream does not join the current one.
  virtual void end() = 0;
  /// Discards a failed recording.
  virtual void abandon() noexcept = 0;
  /// Runs the recorded work on the current stream.
  virtual void replay() = 0;
};

/// Makes an empty graph. Throws NotImplementedError for a device without graphs.
std::unique_ptr<DeviceGraph> make_device_graph(c10::Device device);

/// Makes graphs of simulated GPUs, for tests.
using DeviceGraphMaker = std::unique_ptr<DeviceGraph> (*)();
void set_device_graph_maker(DeviceGraphMaker maker);

}  // namespace tessera
