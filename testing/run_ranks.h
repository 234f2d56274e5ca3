#pragma once
// Runs a test body on several ranks that are threads of this process.
//
//   run_ranks(4, [](int rank) { expect_equal(get_rank(), rank); });  // testing/expect.h
//
// Each rank has a default group over "threads", for CPU and CUDA tensors. If a rank throws, others are woken from their
// collectives. Use testing/expect.h for checks, and make_generator() for random numbers, as ranks share the default
// one.

#include <ATen/core/Generator.h>

#include <chrono>
#include <cstdint>
#include <functional>

namespace tessera {

struct RunRanksOptions {
  std::chrono::milliseconds timeout = std::chrono::seconds(60);  // of collectives
};

/// Calls body(rank) in a thread per rank. Rethrows the first failure with its rank, as the same type of base/error.h or
/// as Error. Throws ValueError if world_size < 1. Thread safety: calls may run concurrently.
void run_ranks(int world_size, const std::function<void(int rank)>& body, RunRanksOptions options = {});

/// Returns a CPU generator; the same seed gives the same numbers on every rank.
at::Generator make_generator(uint64_t seed);

}  // namespace tessera
