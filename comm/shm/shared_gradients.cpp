#include "comm/shm/shared_gradients.h"

#include <c10/core/Allocator.h>

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>

#include "base/error.h"
#include "comm/shm/shared_memory.h"

namespace tessera {

namespace {

/// Below this size a copy costs less than a block.
constexpr size_t kFromBytes = size_t{64} * 1024;

/// Without a destructor, because threads allocate until they end, and models may be destroyed in another thread.
struct WantedSizes {
  std::array<size_t, SharedGradientSizes::kMostSizes> bytes;
  size_t count;
  int backward;  // libtorch's id; a backward that throws ends without end()
};
thread_local WantedSizes wanted = {};

bool is_wanted(size_t bytes) {
  const auto end = wanted.bytes.begin() + static_cast<std::ptrdiff_t>(wanted.count);
  return wanted.count != 0 && std::binary_search(wanted.bytes.begin(), end, bytes) &&
         torch::autograd::get_current_graph_task_id() == wanted.backward;
}

/// Deleter of the previous allocator.
c10::DeleterFnPtr next_deleter = nullptr;

/// For raw_allocate() as used by oneDNN, which passes back only the address.
void free_raw(void* data) {
  if (!free_shared_block(data)) {
    next_deleter(data);
  }
}

class GradientAllocator final : public c10::Allocator {
 public:
  explicit GradientAllocator(c10::Allocator& next) : next_(next) { next_deleter = next.raw_deleter(); }

  c10::DataPtr allocate(size_t bytes) override {
    if (is_wanted(bytes)) {
      try {
        return shared_block(static_cast<int64_t>(bytes));
      } catch (const CommError&) {
        wanted.count = 0;  // shared memory is exhausted: gradients are copied
      }
    }
    return next_.allocate(bytes);
  }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return next_.is_simple_data_ptr(data); }
  c10::DeleterFnPtr raw_deleter() const override { return next_deleter == nullptr ? nullptr : &free_raw; }
  void copy_data(void* to, const void* from, size_t bytes) const override { next_.copy_data(to, from, bytes); }

 private:
  c10::Allocator& next_;
};

}  // namespace

void enable_shared_gradients() {
  // Never destroyed, because storages refer to it until the process ends.
  static const auto* const allocator = [] {
    auto* const made = new GradientAllocator(*c10::GetAllocator(c10::kCPU));
    c10::SetAllocator(c10::kCPU, made);
    return made;
  }();
  static_cast<void>(allocator);
}

SharedGradientSizes::SharedGradientSizes(std::vector<size_t> bytes) : bytes_(std::move(bytes)) {
  std::erase_if(bytes_, [](size_t size) { return size < kFromBytes; });
  std::ranges::sort(bytes_);
  bytes_.erase(std::unique(bytes_.begin(), bytes_.end()), bytes_.end());
  if (bytes_.size() > kMostSizes) {
    bytes_.erase(bytes_.begin(), bytes_.end() - kMostSizes);
  }
}

SharedGradientSizes::~SharedGradientSizes() {
  if (!bytes_.empty()) {
    trim_shared_blocks();
  }
}

void SharedGradientSizes::begin() const {
  std::ranges::copy(bytes_, wanted.bytes.begin());
  wanted.count = bytes_.size();
  wanted.backward = torch::autograd::get_current_graph_task_id();
}

void SharedGradientSizes::end() const {
  wanted.count = 0;
}

}  // namespace tessera
