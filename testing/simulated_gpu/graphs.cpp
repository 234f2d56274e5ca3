// Graphs of simulated GPUs, for CapturedStep.

#include <c10/core/impl/VirtualGuardImpl.h>

#include "captured_step/device_graph.h"
#include "testing/simulated_gpu/gpu_state.h"

namespace tessera::simulated_gpu {

namespace {

c10::Stream current_stream() {
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  return guard.getStream(guard.getDevice());
}

class SimulatedGraph final : public DeviceGraph {
 public:
  void begin() override { GpuState::instance().begin_capture(current_stream()); }
  void end() override { graph_ = GpuState::instance().end_capture(); }
  void abandon() noexcept override { GpuState::instance().abandon_capture(); }
  void replay() override { GpuState::instance().replay(graph_, current_stream()); }

 private:
  Graph graph_;
};

const bool is_set = [] {
  set_device_graph_maker([]() -> std::unique_ptr<DeviceGraph> { return std::make_unique<SimulatedGraph>(); });
  return true;
}();

}  // namespace

}  // namespace tessera::simulated_gpu
