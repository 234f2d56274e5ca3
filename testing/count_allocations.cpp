#include "testing/count_allocations.h"

#include <cstdlib>

namespace tessera::testing {

namespace {

constexpr uint8_t kPriority = 100;

/// Counter of this thread's rank; null: not counted.
thread_local AllocationCounter* current = nullptr;

/// Stores the counter before the memory, for the thread that frees it.
class CountingAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto* const block = static_cast<char*>(std::aligned_alloc(kHeader, (bytes + 2 * kHeader - 1) / kHeader * kHeader));
    *reinterpret_cast<Header*>(block) = {current, static_cast<int64_t>(bytes)};
    if (current) {
      current->add(static_cast<int64_t>(bytes));
    }
    return {block + kHeader, block + kHeader, &release, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static constexpr size_t kHeader = 64;
  struct Header {
    AllocationCounter* owner;
    int64_t bytes;
  };

  static void release(void* data) {
    if (data == nullptr) {
      return;
    }
    auto* const block = static_cast<char*>(data) - kHeader;
    const auto& header = *reinterpret_cast<Header*>(block);
    if (header.owner) {
      header.owner->add(-header.bytes);
    }
    std::free(block);
  }
};

}  // namespace

void AllocationCounter::add(int64_t more) {
  allocations += more > 0;
  const int64_t now = bytes += more;
  int64_t highest = peak;
  while (now > highest && !peak.compare_exchange_weak(highest, now)) {
  }
}

CountingScope::CountingScope(AllocationCounter& counter) {
  current = &counter;
}

CountingScope::~CountingScope() {
  current = nullptr;
}

CountAllocations::CountAllocations() : former_(c10::GetAllocator(at::kCPU)) {
  static auto* const counting = new CountingAllocator;
  c10::SetAllocator(at::kCPU, counting, kPriority);
}

CountAllocations::~CountAllocations() {
  c10::SetAllocator(at::kCPU, former_, kPriority);
}

}  // namespace tessera::testing
