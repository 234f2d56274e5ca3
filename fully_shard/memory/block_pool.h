#pragma once
// BlockPool: recycles memory for units' unsharded parameters and communication buffers.
//
//   PoolBlockPtr block = pool->acquire(bytes);
//   set_memory(tensor, block, 0, tensor_bytes);     // the tensor's storage holds the block
//   block.reset();
//   clear_memory(tensor);                           // drops the last reference: the block is free for the next unit
//
// malloc would return blocks of this size to the system, and page-fault on each reuse. The pool keeps up to 1.25 times
// the peak of acquired bytes. On other devices, acquire() uses libtorch's caching allocators.
//
// Thread safety: any thread. Blocks may outlive the pool.

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace tessera {

class BlockPool;

/// Acquired block, returned to its pool by the last reference.
class PoolBlock : public c10::intrusive_ptr_target {
 public:
  PoolBlock(std::weak_ptr<BlockPool> pool, c10::DataPtr memory, size_t bytes);
  ~PoolBlock() override;

  /// Returns a pointer into the block that keeps it alive.
  c10::DataPtr part(size_t offset);
  size_t bytes() const { return bytes_; }

 private:
  std::weak_ptr<BlockPool> pool_;
  c10::DataPtr memory_;
  size_t bytes_;
};
using PoolBlockPtr = c10::intrusive_ptr<PoolBlock>;

class BlockPool : public std::enable_shared_from_this<BlockPool> {
 public:
  explicit BlockPool(at::Device device) : device_(device) {}

  /// Returns a block of at least `bytes` bytes, aligned for any dtype, with undefined contents.
  PoolBlockPtr acquire(size_t bytes);

  /// Bytes obtained from the system, bytes in use, and their peak since reset_peak().
  struct Stats {
    size_t held, acquired, peak;
  };
  Stats stats() const;
  void reset_peak();

 private:
  friend class PoolBlock;
  struct FreeBlock {
    c10::DataPtr memory;
    size_t bytes;
  };
  void release(c10::DataPtr memory, size_t bytes);
  FreeBlock take(size_t bytes);
  void drop_surplus();

  const at::Device device_;
  mutable std::mutex mutex_;
  std::vector<FreeBlock> free_;  // longest free first
  size_t free_bytes_ = 0, acquired_ = 0, peak_ = 0, highest_ = 0;
};

/// Returns a contiguous tensor whose storage has no memory yet.
at::Tensor tensor_without_memory(at::IntArrayRef sizes, const at::TensorOptions& options);
/// Sets the storage of `tensor` to bytes [offset, offset + bytes) of `block`. Affects all tensors that share the
/// storage.
void set_memory(const at::Tensor& tensor, PoolBlock& block, size_t offset, size_t bytes);
/// Empties the storage of `tensor` and returns its memory, which is freed with the result.
c10::DataPtr clear_memory(const at::Tensor& tensor);

/// Turns reads of a storage without memory into errors. With libtorch 2.11, it does nothing, and such reads are
/// undefined.
class ReadGuard {
 public:
  ReadGuard() = default;
  /// Makes reads of the storage throw `text`, except between allow_reads() and forbid_reads().
  ReadGuard(const at::Tensor& tensor, const std::string& text);

  void allow_reads() { set_forbidden(false); }
  /// Forbids reads after clear_memory(), if another tensor shares the storage.
  void forbid_reads() { set_forbidden(guarded_ && guarded_.use_count() > kOwners); }
  static bool is_effective();

 private:
  void set_forbidden(bool forbidden);

  static constexpr size_t kOwners = 2;  // own references to the storage: the tensor and this
  /// The storage keeps the text. Its flag for forbidden reads is swapped with the other storage's.
  c10::Storage guarded_, other_;
  bool is_forbidden_ = true;
};

/// 1-D tensor whose memory can be acquired and released while the tensor object stays.
class PooledBuffer {
 public:
  PooledBuffer() = default;
  PooledBuffer(int64_t numel, const at::TensorOptions& options) : tensor_(tensor_without_memory({numel}, options)) {}

  /// Acquires memory with undefined contents.
  const at::Tensor& acquire(BlockPool& pool);
  /// Releases the memory, which is freed with the result.
  c10::DataPtr release();
  const at::Tensor& tensor() const { return tensor_; }

 private:
  at::Tensor tensor_;
};

}  // namespace tessera
