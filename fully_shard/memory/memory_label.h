#pragma once
// Labels allocations with their purpose for observers (debug/memory_timeline.h).
//
//   const MemoryLabel label(MemoryUse::GatheredParameters, "block0");   // applies to this thread's allocations
//
// Thread safety: all state belongs to the calling thread.

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera {

enum class MemoryUse : uint8_t { Other, GatheredParameters, Gradients };

/// Scope that labels allocations. Scopes nest; the innermost applies. `unit` must outlive the scope.
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
  Released,  // back in the pool
  Dropped,   // returned to the allocator
};

/// Observes a pool's blocks, which allocators do not see. Found by a dynamic_cast of the thread's
/// c10::MemoryReportingInfoBase.
class PoolObserver {
 public:
  virtual ~PoolObserver() = default;
  virtual void on_pool_block(const void* memory, size_t bytes, PoolStep step) = 0;
};

/// Notifies the thread's observer, if there is one.
void report_pool_block(const void* memory, size_t bytes, PoolStep step);

}  // namespace tessera
