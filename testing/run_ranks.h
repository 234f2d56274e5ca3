#pragma once
// Runs a test body on several ranks that are threads of this process.
//
//   run_ranks(4, [](int rank) {
//     DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
//     at::Tensor x = at::full({3}, float(rank));
//     all_reduce(x, ReduceOp::Sum, mesh.group("dp"));
//     expect_equal(x[0].item<float>(), rank < 2 ? 2.f * rank + 2 : 2.f * rank - 2);     // testing/expect.h
//   });
//
// Each rank has its own default group over the "threads" backend, set up before the body and ended after it. When a
// rank throws, the others are woken from their collectives. Catch2's assertions are not for several threads: use
// testing/expect.h in the body.
//
// The group carries tensors of the CPU and of CUDA: on one GPU the ranks share it (testing/test_devices.h). Backward
// runs in the rank's own thread on CUDA too, where libtorch would use one thread of a device for all ranks.
//
// Ranks share what is global in the process: the default CPU generator above all, so that torch::manual_seed and
// at::randn without a generator give numbers that depend on how the threads interleave. Pass make_generator(seed).

#include <ATen/core/Generator.h>

#include <chrono>
#include <cstdint>
#include <functional>

namespace tessera {

struct RunRanksOptions {
  /// How long a collective waits for its peers before it fails and names those that did not come.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
};

/// Calls body(rank) for rank = 0 .. world_size-1, each in a thread of its own, and returns when all have ended. The
/// failure that happened first is rethrown, with "rank 2: " before its text; the types of base/error.h are kept,
/// any other std::exception becomes an Error. CommErrors that only follow from it are dropped.
/// Throws ValueError if world_size < 1. Thread safety: calls may run at the same time.
void run_ranks(int world_size, const std::function<void(int rank)>& body, RunRanksOptions options = {});

/// A CPU generator of its own, for at::randn(sizes, generator). The same seed gives the same numbers on every rank.
at::Generator make_generator(uint64_t seed);

}  // namespace tessera
