#pragma once
// Devices for tests: the CPU and a GPU, which is real with --config=cuda and otherwise simulated
// (testing/simulated_gpu).
//
//   run_ranks_on_devices(2, [&](int rank, c10::Device device) { auto mesh = init_device_mesh(device.type(), {2}); });

#include <c10/core/Device.h>
#include <c10/core/StreamGuard.h>

#include <functional>
#include <optional>
#include <vector>

namespace tessera {

/// Returns the CPU and GPU 0. With --config=cuda but without a GPU, returns the CPU only and prints "skipped: ...",
/// which tools/gpu_check/run.py reads. Call it in a Catch2 test, outside its ranks.
std::vector<c10::Device> test_devices();

/// Makes the calling thread compute on a new stream of `device`. Only collectives then order ranks that share a GPU.
class OwnStream {
 public:
  explicit OwnStream(c10::Device device);

 private:
  std::optional<c10::StreamGuard> guard_;
};

/// Like run_ranks, on each device, with a stream per rank.
void run_ranks_on_devices(int world_size, const std::function<void(int rank, c10::Device device)>& body);

}  // namespace tessera
