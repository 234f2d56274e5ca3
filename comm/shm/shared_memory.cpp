#include "comm/shm/shared_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "comm/shm/shm_layout.h"

namespace tessera {

namespace {

struct Block;

/// Head of a block, before its tensor.
struct BlockHead {
  std::atomic<uint32_t> lives;
  std::atomic<uint32_t> use;  // starts at 0
  Block* block;               // valid in the owning process, and in its children after fork()
};
constexpr int64_t kHeadBytes = ShmLayout::kPage;

BlockHead& block_head(const FileMapping& block) {
  return *reinterpret_cast<BlockHead*>(block.base());
}

/// Owner of a shared tensor's memory.
struct Block {
  int owner;  // pid
  int file;
  int64_t offset;
  FileMapping memory;
};

struct ReleaseBlock {
  void operator()(Block* block) const noexcept {
    if (block->owner == getpid()) {
      fallocate(block->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, block->offset, block->memory.bytes());
    }
    delete block;
  }
};

using OwnedBlock = std::unique_ptr<Block, ReleaseBlock>;

char* block_data(const Block& block) {
  return block.memory.base() + kHeadBytes;
}

/// Returns the block whose tensor memory begins at `data`.
Block* find_block(void* data) {
  return reinterpret_cast<BlockHead*>(static_cast<char*>(data) - kHeadBytes)->block;
}

int64_t block_size(int64_t bytes) {
  return ShmLayout::round_up(kHeadBytes + bytes, ShmLayout::kMapAlignment);
}

/// This process's file and its free blocks. Never closed, because tensors may be freed after statics are destroyed.
class OwnFile {
 public:
  /// Makes a new block.
  OwnedBlock make(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    return make_locked(bytes);
  }

  /// Returns a free block of the size, or a new one.
  OwnedBlock acquire(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    forget_parents();
    const int64_t size = block_size(bytes);
    const auto found = std::find_if(free_.rbegin(), free_.rend(),
                                    [&](const OwnedBlock& block) { return block->memory.bytes() == size; });
    OwnedBlock block = found == free_.rend() ? make_locked(bytes) : std::move(*found);
    if (found != free_.rend()) {
      free_.erase(std::next(found).base());
      free_bytes_ -= size;
    }
    used_bytes_ += size;
    most_used_ = std::max(most_used_, used_bytes_);
    used_.insert(block_data(*block));
    return block;
  }

  /// Returns whether this is the memory of a block acquired by this process, or by a parent before fork().
  bool is_acquired(const void* data) {
    const std::lock_guard lock(mutex_);
    return used_.contains(data);
  }

  void release(OwnedBlock block) {
    std::vector<OwnedBlock> surplus;  // returned to the system after unlocking
    const std::lock_guard lock(mutex_);
    used_.erase(block_data(*block));
    if (block->owner != getpid() || block->owner != owner_) {
      return;  // inherited from the parent
    }
    block_head(block->memory).use.fetch_add(1);
    used_bytes_ -= block->memory.bytes();
    free_bytes_ += block->memory.bytes();
    free_.push_back(std::move(block));
    while (4 * (free_bytes_ + used_bytes_) > 5 * most_used_) {
      free_bytes_ -= free_.front()->memory.bytes();
      surplus.push_back(std::move(free_.front()));
      free_.pop_front();
    }
  }

  void trim() {
    std::deque<OwnedBlock> free;
    const std::lock_guard lock(mutex_);
    forget_parents();
    free.swap(free_);
    free_bytes_ = 0;
    most_used_ = used_bytes_;
  }

  static OwnFile& get() {
    static auto* const file = [] {
      // A thread may fork while another one is here; the child's lock must not stay locked.
      pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); }, [] { get().mutex_.unlock(); });
      return new OwnFile();
    }();
    return *file;
  }

 private:
  /// Detaches from the parent's file after fork().
  void forget_parents() {
    if (owner_ != getpid()) {
      owner_ = getpid();
      file_ = FileDescriptor();
      end_ = free_bytes_ = used_bytes_ = most_used_ = 0;
      free_.clear();
    }
  }

  OwnedBlock make_locked(int64_t bytes) {
    forget_parents();
    if (!file_) {
      file_ = FileDescriptor::in_memory("shared");
    }
    const int64_t size = block_size(bytes);
    file_.resize(end_ + size);
    OwnedBlock block(new Block{owner_, file_.number(), end_, FileMapping(file_, end_, size)});
    end_ += size;
    block_head(block->memory).block = block.get();
    block_head(block->memory).lives.store(1);
    return block;
  }

  std::mutex mutex_;
  int owner_ = -1;
  FileDescriptor file_;
  int64_t end_ = 0;
  std::deque<OwnedBlock> free_;           // longest free first
  std::unordered_set<const void*> used_;  // data of acquired blocks
  int64_t free_bytes_ = 0, used_bytes_ = 0, most_used_ = 0;
};

void release(void* data) noexcept {
  ReleaseBlock()(find_block(data));
}

/// Reports an allocation to memory profilers, like libtorch's CPU allocator.
void report_block(void* data, int64_t bytes) {
  if (c10::memoryProfilingEnabled()) {
    c10::reportMemoryUsageToProfiler(data, bytes, /*total_allocated=*/0, /*total_reserved=*/0, c10::kCPU);
  }
}

void recycle(void* data) noexcept {
  OwnedBlock block(find_block(data));
  report_block(data, -block->memory.bytes());
  OwnFile::get().release(std::move(block));
}

/// Makes a pointer like libtorch's allocators: the context is the address itself (c10::Allocator::raw_allocate).
at::DataPtr make_data_ptr(OwnedBlock block, c10::DeleterFnPtr deleter) {
  void* const data = block_data(*block.release());
  return {data, data, deleter, c10::kCPU};
}

std::atomic<int64_t> mapped_bytes = 0;

}  // namespace

at::Tensor shared_zeros(int64_t numel, at::ScalarType dtype) {
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, make_data_ptr(OwnFile::get().make(bytes), release),
                       /*allocator=*/nullptr, /*resizable=*/false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                         c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return tensor;
}

at::DataPtr shared_block(int64_t bytes) {
  auto block = OwnFile::get().acquire(bytes);
  report_block(block_data(*block), block->memory.bytes());
  return make_data_ptr(std::move(block), recycle);
}

bool free_shared_block(void* data) {
  const bool is_block = OwnFile::get().is_acquired(data);
  if (is_block) {
    recycle(data);
  }
  return is_block;
}

void trim_shared_blocks() {
  OwnFile::get().trim();
}

std::optional<SharedPlace> shared_place(const at::Tensor& tensor) {
  const auto& data = tensor.storage().data_ptr();
  if (data.get_deleter() != release && data.get_deleter() != recycle) {
    return std::nullopt;
  }
  const Block& block = *find_block(data.get_context());
  if (block.owner != getpid()) {
    return std::nullopt;
  }
  return SharedPlace{.file = block.file,
                     .use = block_head(block.memory).use.load(),
                     .block = block.offset,
                     .block_bytes = block.memory.bytes(),
                     .offset = static_cast<const char*>(tensor.const_data_ptr()) - block.memory.base()};
}

PeerMemory::~PeerMemory() {
  for (const auto& [offset, block] : blocks_) {
    mapped_bytes -= block.bytes();
  }
}

const char* PeerMemory::find(const SharedPlace& place) {
  auto found = blocks_.find(place.block);
  if (found == blocks_.end()) {
    drop_dead();
    if (!file_) {
      file_ =
          FileDescriptor::open_own("opening a peer's shared memory", fmt::format("/proc/{}/fd/{}", pid_, place.file));
    }
    FileMapping block(file_, place.block, place.block_bytes, FileMapping::Access::Read);
    found = blocks_.emplace(place.block, std::move(block)).first;
    mapped_bytes += place.block_bytes;
  }
  return found->second.base() + place.offset;
}

bool PeerMemory::is_alive(const SharedPlace& place) const {
  std::atomic_thread_fence(std::memory_order_acquire);
  const BlockHead& head = block_head(blocks_.at(place.block));
  return head.lives.load() == 1 && head.use.load() == place.use;
}

void PeerMemory::drop_dead() {
  for (auto block = blocks_.begin(); block != blocks_.end();) {
    if (block_head(block->second).lives.load() == 1) {
      ++block;
    } else {
      mapped_bytes -= block->second.bytes();
      block = blocks_.erase(block);
    }
  }
}

int64_t mapped_peer_bytes() {
  return mapped_bytes;
}

int64_t resident_peer_bytes() {
  std::ifstream maps("/proc/self/smaps");
  bool is_peers = false;
  int64_t bytes = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find(" r--s ") != std::string::npos) {
      is_peers = line.find("memfd:tessera_shared") != std::string::npos;  // this process's own blocks may be written
    } else if (is_peers && line.starts_with("Rss:")) {
      bytes += 1024 * std::stoll(line.substr(4));
      is_peers = false;
    }
  }
  return bytes;
}

}  // namespace tessera
