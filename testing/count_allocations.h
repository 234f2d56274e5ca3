#pragma once
// Counts what ranks that are threads allocate for tensors on the CPU, below libtorch. A test that counts is a program
// of its own: the allocator is that of the whole process.
//
//   const CountAllocations counting;
//   AllocationCounter own;
//   run_ranks(1, [&](int) { const CountingScope scope(own); ... });
//   own.peak;                                                          // bytes
//
// Thread safety: a counter may be read by any thread.

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>

namespace tessera::testing {

/// Bytes of one rank's tensors now and at most, and the number of allocations so far.
struct AllocationCounter {
  std::atomic<int64_t> bytes = 0, peak = 0, allocations = 0;

  void add(int64_t more);
};

/// Counts what the calling thread allocates, also where another one frees it.
class CountingScope {
 public:
  explicit CountingScope(AllocationCounter& counter);
  ~CountingScope();
  CountingScope(const CountingScope&) = delete;
  CountingScope& operator=(const CountingScope&) = delete;
};

/// Makes allocations countable as long as it lives. Memory that was allocated meanwhile may be freed later.
class CountAllocations {
 public:
  CountAllocations();
  ~CountAllocations();
  CountAllocations(const CountAllocations&) = delete;
  CountAllocations& operator=(const CountAllocations&) = delete;

 private:
  c10::Allocator* former_;
};

}  // namespace tessera::testing
