#pragma once
// The devices that a test runs on: a test over them is one of the CPU and of a GPU everywhere. Under --config=cuda it
// is a real one, where there is one; else testing/simulated_gpu.
//
//   run_ranks_on_devices(2, [&](int rank, c10::Device device) {          // ranks share the GPU
//   (comm/threads/thread_backend.h)
//     const auto mesh = init_device_mesh(device.type(), {2});
//     const auto x = at::full({3}, float(rank), device);
//     ...
//
// A target that depends on it links libtorch's CUDA half under --config=cuda, the simulation else, and is compiled the
// same.

#include <c10/core/Device.h>
#include <c10/core/StreamGuard.h>

#include <functional>
#include <optional>
#include <vector>

namespace tessera {

/// The CPU and GPU 0. Where a build with --config=cuda sees no GPU, the CPU alone, and prints "skipped: <test>: no CUDA
/// device ..." (tools/gpu_check/run.py reads it). In a Catch2 test, outside its ranks.
std::vector<c10::Device> test_devices();

/// For its lifetime the calling thread computes on a new stream of `device`; on the CPU it does nothing. Ranks that
/// share a GPU, each with one, are ordered by their collectives alone, as those of several GPUs are.
class OwnStream {
 public:
  explicit OwnStream(c10::Device device);

 private:
  std::optional<c10::StreamGuard> guard_;
};

/// run_ranks (testing/run_ranks.h) on each of the devices, every rank on a stream of its own.
void run_ranks_on_devices(int world_size, const std::function<void(int rank, c10::Device device)>& body);

}  // namespace tessera
