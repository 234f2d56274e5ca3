#pragma once
// Counts CPU tensor memory of ranks that are threads, below libtorch. Such a test needs a separate program, because the
// allocator is shared by the whole process.
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

/// Current and peak bytes of one rank's tensors, and the number of allocations so far.
struct AllocationCounter {
  std::atomic<int64_t> bytes = 0, peak = 0, allocations = 0;

  void add(int64_t more);
};

/// Counts allocations of the calling thread, even if another thread frees them.
class CountingScope {
 public:
  explicit CountingScope(AllocationCounter& counter);
  ~CountingScope();
  CountingScope(const CountingScope&) = delete;
  CountingScope& operator=(const CountingScope&) = delete;
};

/// Enables counting while it lives. Memory allocated during that time may be freed later.
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
