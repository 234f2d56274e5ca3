#include "base/error.h"
#include "captured_step/cuda_graph.h"

namespace tessera {

std::unique_ptr<DeviceGraph> make_cuda_graph() {
  throw NotImplementedError("a step cannot be captured: this build has no CUDA; build with --config=cuda");
}

}  // namespace tessera
