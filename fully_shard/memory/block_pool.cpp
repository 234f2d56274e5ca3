#include "fully_shard/memory/block_pool.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <utility>

#include "fully_shard/memory/memory_label.h"

namespace tessera {

namespace {

/// A free block more than this many times larger than a request is kept for a larger request.
constexpr size_t kLargestFit = 2;

c10::StorageImpl* find_storage(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

template <class Storage>
constexpr bool kCanExchange = requires(Storage storage) {
  storage.swap_data_ptr(storage);
};

template <class Storage>
void exchange(Storage& a, Storage& b) {
  if constexpr (kCanExchange<Storage>) {
    a.swap_data_ptr(b);
  }
}

}  // namespace

PoolBlock::PoolBlock(std::weak_ptr<BlockPool> pool, c10::DataPtr memory, size_t bytes)
    : pool_(std::move(pool)), memory_(std::move(memory)), bytes_(bytes) {}

PoolBlock::~PoolBlock() {
  if (const auto pool = pool_.lock()) {
    pool->release(std::move(memory_), bytes_);
  }
}

c10::DataPtr PoolBlock::part(size_t offset) {
  c10::raw::intrusive_ptr::incref(this);
  const auto release = [](void* block) { c10::raw::intrusive_ptr::decref(static_cast<PoolBlock*>(block)); };
  return {static_cast<char*>(memory_.get()) + offset, this, release, memory_.device()};
}

PoolBlockPtr BlockPool::acquire(size_t bytes) {
  auto block = take(bytes);
  return c10::make_intrusive<PoolBlock>(weak_from_this(), std::move(block.memory), block.bytes);
}

BlockPool::FreeBlock BlockPool::take(size_t bytes) {
  const std::lock_guard lock(mutex_);
  auto best = free_.end();
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    const bool fits = block->bytes >= bytes && block->bytes <= kLargestFit * bytes;
    if (fits && (best == free_.end() || block->bytes < best->bytes)) {
      best = block;
    }
  }
  FreeBlock found{{}, bytes};
  if (best != free_.end()) {
    found = std::move(*best);
    free_.erase(best);
    free_bytes_ -= found.bytes;
  }
  acquired_ += found.bytes;
  peak_ = std::max(peak_, acquired_);
  highest_ = std::max(highest_, acquired_);
  if (found.memory.get() == nullptr) {
    drop_surplus();
    const c10::DeviceGuard guard(device_);  // allocators serve the current device
    found.memory = c10::GetAllocator(device_.type())->allocate(bytes);
  }
  if (device_.is_cpu()) {
    report_pool_block(found.memory.get(), found.bytes, PoolStep::Acquired);
  }
  return found;
}

void BlockPool::release(c10::DataPtr memory, size_t bytes) {
  const std::lock_guard lock(mutex_);
  acquired_ -= bytes;
  if (device_.is_cpu() && bytes > 0) {
    report_pool_block(memory.get(), bytes, PoolStep::Released);
    free_.push_back({std::move(memory), bytes});
    free_bytes_ += bytes;
    drop_surplus();
  }
}

void BlockPool::drop_surplus() {
  while (!free_.empty() && free_bytes_ + acquired_ > highest_ + highest_ / 4) {
    free_bytes_ -= free_.front().bytes;
    report_pool_block(free_.front().memory.get(), free_.front().bytes, PoolStep::Dropped);
    free_.erase(free_.begin());
  }
}

BlockPool::Stats BlockPool::stats() const {
  const std::lock_guard lock(mutex_);
  return {.held = free_bytes_ + acquired_, .acquired = acquired_, .peak = peak_};
}

void BlockPool::reset_peak() {
  const std::lock_guard lock(mutex_);
  peak_ = acquired_;
}

at::Tensor tensor_without_memory(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView below;
  auto tensor = at::empty({0}, options);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

void set_memory(const at::Tensor& tensor, PoolBlock& block, size_t offset, size_t bytes) {
  auto* storage = find_storage(tensor);
  storage->set_data_ptr_noswap(block.part(offset));
  storage->set_nbytes(bytes);
}

c10::DataPtr clear_memory(const at::Tensor& tensor) {
  auto* storage = find_storage(tensor);
  storage->set_nbytes(0);
  return storage->set_data_ptr(c10::DataPtr(nullptr, tensor.device()));
}

ReadGuard::ReadGuard(const at::Tensor& tensor, const std::string& text) {
  if (!is_effective()) {
    return;
  }
  guarded_ = tensor.storage();
  guarded_.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(text);
  other_ = c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, tensor.device()),
                        guarded_.allocator(), guarded_.resizable());
}

void ReadGuard::set_forbidden(bool forbidden) {
  if (guarded_ && std::exchange(is_forbidden_, forbidden) != forbidden) {
    exchange(*guarded_.unsafeGetStorageImpl(), *other_.unsafeGetStorageImpl());
  }
}

bool ReadGuard::is_effective() {
  return kCanExchange<c10::StorageImpl>;
}

const at::Tensor& PooledBuffer::acquire(BlockPool& pool) {
  const size_t bytes = static_cast<size_t>(tensor_.numel()) * tensor_.element_size();
  set_memory(tensor_, *pool.acquire(bytes), 0, bytes);
  return tensor_;
}

c10::DataPtr PooledBuffer::release() {
  return tensor_.defined() ? clear_memory(tensor_) : c10::DataPtr();
}

}  // namespace tessera
