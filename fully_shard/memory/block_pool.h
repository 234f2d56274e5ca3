#pragma once
// BlockPool: memory that units acquire for their unsharded parameters and communication buffers, and give back.
//
//   PoolBlockPtr block = pool->acquire(bytes);
//   set_memory(tensor, block, 0, tensor_bytes);     // the tensor's storage holds the block
//   block.reset();
//   clear_memory(tensor);                           // last holder gone: the block is free for the next unit
//
// Malloc would give blocks of this size back to the system, and page-fault on them each time. The pool keeps a quarter
// more than were ever acquired at one time. On other devices acquire() goes to libtorch's caching allocators.
//
// Thread safety: any thread, also for dropping a block after the pool.

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace tessera {

class BlockPool;

/// A piece of acquired memory. It goes back to its pool with its last holder.
class PoolBlock : public c10::intrusive_ptr_target {
 public:
  PoolBlock(std::weak_ptr<BlockPool> pool, c10::DataPtr memory, size_t bytes);
  ~PoolBlock() override;

  /// A pointer into the block that holds it.
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

  /// Returns at least `bytes` bytes, aligned for any dtype; contents undefined.
  PoolBlockPtr acquire(size_t bytes);

  /// Bytes that the pool has from the system, those in use, and the most that were since reset_peak().
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
  std::vector<FreeBlock> free_;  // the longest free first
  size_t free_bytes_ = 0, acquired_ = 0, peak_ = 0, highest_ = 0;
};

/// A contiguous tensor whose storage has no bytes yet.
at::Tensor tensor_without_memory(at::IntArrayRef sizes, const at::TensorOptions& options);
/// The storage of `tensor` gets [offset, offset + bytes) of `block`; tensors and views that share it see them.
void set_memory(const at::Tensor& tensor, PoolBlock& block, size_t offset, size_t bytes);
/// The storage of `tensor` has 0 bytes again; its memory ends with the result.
c10::DataPtr clear_memory(const at::Tensor& tensor);

/// Makes reads of a storage without memory an error. With libtorch 2.11 it does nothing, and they are undefined.
class ReadGuard {
 public:
  ReadGuard() = default;
  /// Makes reads of the storage throw this text, except between allow_reads() and forbid_reads().
  ReadGuard(const at::Tensor& tensor, const std::string& text);

  void allow_reads() { set_forbidden(false); }
  /// Forbids reads after clear_memory(), if another tensor has the storage.
  void forbid_reads() { set_forbidden(guarded_ && guarded_.use_count() > kOwners); }
  static bool is_effective();

 private:
  void set_forbidden(bool forbidden);

  static constexpr size_t kOwners = 2;  // of the storage: the tensor, and this
  /// The storage keeps the text; what says whether it holds is exchanged with the other one's.
  c10::Storage guarded_, other_;
  bool is_forbidden_ = true;
};

/// A 1-D tensor whose memory comes and goes while the tensor object stays.
class PooledBuffer {
 public:
  PooledBuffer() = default;
  PooledBuffer(int64_t numel, const at::TensorOptions& options) : tensor_(tensor_without_memory({numel}, options)) {}

  /// Contents are undefined after it.
  const at::Tensor& acquire(BlockPool& pool);
  /// The memory ends with the result.
  c10::DataPtr release();
  const at::Tensor& tensor() const { return tensor_; }

 private:
  at::Tensor tensor_;
};

}  // namespace tessera
