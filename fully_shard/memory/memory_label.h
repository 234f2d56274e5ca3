#pragma once
// What memory is for, told to those that watch allocations (debug/memory_timeline.h).
//
//   const MemoryLabel label(MemoryUse::GatheredParameters, "block0");   // of what this thread allocates from here on
//
// Thread safety: everything is the calling thread's.

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera {

enum class MemoryUse : uint8_t { Other, GatheredParameters, Gradients };

/// Scopes nest, and the innermost one applies. `unit` must outlive the scope.
class MemoryLabel {
 public:
  MemoryLabel(MemoryUse use, std::string_view unit);
  ~MemoryLabel();
  MemoryLabel(const MemoryLabel&) = delete;
  MemoryLabel& operator=(const MemoryLabel&) = delete;

  static MemoryUse current_use();
  static std::string_view current_unit();

 private:
  MemoryUse previous_use_;
  std::string_view previous_unit_;
};

enum class PoolStep : uint8_t {
  Acquired,
  Released,  // the pool keeps it
  Dropped,   // the pool gives it to the allocator
};

/// Learns what becomes of a pool's blocks, which allocators do not see. The thread's c10::MemoryReportingInfoBase is
/// asked whether it is one.
class PoolObserver {
 public:
  virtual ~PoolObserver() = default;
  virtual void on_pool_block(const void* memory, size_t bytes, PoolStep step) = 0;
};

/// Calls the thread's observer, if there is one.
void report_pool_block(const void* memory, size_t bytes, PoolStep step);

}  // namespace tessera
