#include "testing/simulated_gpu/pinned_memory.h"

#include <c10/core/CPUAllocator.h>

#include <map>
#include <mutex>

#include "testing/simulated_gpu/gpu_state.h"

namespace tessera::simulated_gpu {

namespace {

/// Addresses and sizes of allocations.
class Blocks {
 public:
  static Blocks& instance() {
    static auto* const blocks = new Blocks;  // never destroyed, because static tensors may outlive it
    return *blocks;
  }

  void add(void* address, size_t bytes) {
    const std::lock_guard lock(mutex_);
    blocks_[static_cast<const char*>(address)] = bytes;
  }
  size_t remove(void* address) {
    const std::lock_guard lock(mutex_);
    return blocks_.extract(static_cast<const char*>(address)).mapped();
  }
  bool contains(const void* address) {
    const std::lock_guard lock(mutex_);
    const auto next = blocks_.upper_bound(static_cast<const char*>(address));
    return next != blocks_.begin() && address < std::prev(next)->first + std::prev(next)->second;
  }

 private:
  std::mutex mutex_;
  std::map<const char*, size_t> blocks_;
};

void free_pinned(void* address) {
  GpuState::instance().drop_deliveries(address, Blocks::instance().remove(address));
  c10::GetDefaultCPUAllocator()->raw_deallocate(address);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, c10::kCPU};
    }
    void* const address = c10::GetDefaultCPUAllocator()->raw_allocate(bytes);
    Blocks::instance().add(address, bytes);
    return {address, address, &free_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void* /*address*/, void* /*context*/, c10::Stream /*stream*/) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

at::HostAllocator& pinned_allocator() {
  static auto* const allocator = new PinnedAllocator;
  return *allocator;
}

bool is_pinned(const void* address) {
  return Blocks::instance().contains(address);
}

}  // namespace tessera::simulated_gpu
