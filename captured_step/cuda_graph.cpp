#include "captured_step/cuda_graph.h"

#include <ATen/cuda/CUDAGraph.h>

#include <exception>

namespace tessera {

namespace {

class CudaGraph final : public DeviceGraph {
 public:
  /// Other threads, such as NCCL's watchdog, may still make calls that the captured stream's thread must not make.
  void begin() override { graph_.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal); }
  void end() override { graph_.capture_end(); }
  void abandon() noexcept override {
    try {
      graph_.capture_end();
    } catch (const std::exception&) {  // the capture has failed, and has ended
    }
  }
  void replay() override { graph_.replay(); }

 private:
  at::cuda::CUDAGraph graph_;
};

}  // namespace

std::unique_ptr<DeviceGraph> make_cuda_graph() {
  return std::make_unique<CudaGraph>();
}

}  // namespace tessera
