#pragma once
// CUDA graphs, in builds with --config=cuda.

#include <memory>

#include "captured_step/device_graph.h"

namespace tessera {

/// Makes an empty graph. Throws NotImplementedError in a build without CUDA.
std::unique_ptr<DeviceGraph> make_cuda_graph();

}  // namespace tessera
