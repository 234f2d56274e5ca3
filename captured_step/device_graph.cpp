#include "captured_step/device_graph.h"

#include "base/error.h"
#include "captured_step/cuda_graph.h"

namespace tessera {

namespace {

DeviceGraphMaker& current_maker() {
  static DeviceGraphMaker current = nullptr;
  return current;
}

}  // namespace

void set_device_graph_maker(DeviceGraphMaker maker) {
  current_maker() = maker;
}

std::unique_ptr<DeviceGraph> make_device_graph(c10::Device device) {
  TESSERA_CHECK(NotImplementedError, device.is_cuda(),
                "a step on {} cannot be captured, only one on a CUDA device; call the step itself", device.str());
  return current_maker() ? current_maker()() : make_cuda_graph();
}

}  // namespace tessera
