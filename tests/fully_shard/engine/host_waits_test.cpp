// On a GPU libtorch itself tells when the host waits for it. Without one, streams_test.cpp counts on a simulated GPU.

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAFunctions.h>

#include <optional>

#include "comm/collectives.h"
#include "fully_shard/fully_shard.h"
#include "optim/fused_optimizers.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/test_devices.h"
#include "tests/cuda/gpu_test.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

const c10::Device kFirstGpu(c10::kCUDA, 0);

/// For its lifetime what makes the host wait for a GPU is an error, in all threads.
class HostWaitsForbidden {
 public:
  HostWaitsForbidden() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR); }
  ~HostWaitsForbidden() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED); }
  HostWaitsForbidden(const HostWaitsForbidden&) = delete;
  HostWaitsForbidden& operator=(const HostWaitsForbidden&) = delete;
};

TEST_CASE("on a GPU the host waits for nothing in a steady step") {
  if (cuda::skip_without_devices(1)) {
    return;
  }
  const int world_size = GENERATE(1, 2, 3);
  const bool is_mixed = GENERATE(false, true);
  run_ranks(world_size, [&](int rank) {
    const OwnStream stream(kFirstGpu);
    Tower tower;
    fill_parameters(*tower, 1);
    tower->to(kFirstGpu);
    FullyShardOptions options{.mesh = init_device_mesh(at::kCUDA, {world_size})};
    if (is_mixed) {
      options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    }
    shard_tower(tower, options);
    optim::FusedAdamW optimizer(tower->parameters(), torch::optim::AdamWOptions(1e-2));
    const at::Tensor input = make_batch(static_cast<uint64_t>(rank), 3, 5).to(kFirstGpu);
    std::optional<HostWaitsForbidden> forbidden;
    for (int step = 0; step < 4; ++step) {
      barrier(default_group());
      if (step == 2) {
        forbidden.emplace();
        expect_throws<c10::Error>([] { at::zeros({1}, kFirstGpu).item<float>(); }, "synchronizing");
        barrier(default_group());
      }
      optimizer.zero_grad();
      tower(input).square().sum().backward();
      optimizer.step();
    }
    barrier(default_group());
  });
}

}  // namespace
}  // namespace tessera::testing
