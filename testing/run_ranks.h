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
// Each rank has its own default group over the "threads" backend, for tensors of the CPU and of CUDA, which ranks
// share. When a rank throws, the others are woken from their collectives. Catch2's assertions are not thread-safe: use
// testing/expect.h in the body.
//
// Ranks share the process's default CPU generator, so numbers from it depend on how threads interleave. Use
// make_generator(seed).

#include <ATen/core/Generator.h>

#include <chrono>
#include <cstdint>
#include <functional>

namespace tessera {

struct RunRanksOptions {
  /// How long a collective waits for its peers before it fails and names those that did not come.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
};

/// Calls body(rank) for each rank in a thread of its own, and returns when all have ended.
/// Rethrows the first failure with "rank 2: " before its text; the types of base/error.h are kept, any other exception
/// becomes an Error. Throws ValueError if world_size < 1. Thread safety: calls may run at the same time.
void run_ranks(int world_size, const std::function<void(int rank)>& body, RunRanksOptions options = {});

/// A CPU generator of its own, for at::randn(sizes, generator). The same seed gives the same numbers on every rank.
at::Generator make_generator(uint64_t seed);

}  // namespace tessera
