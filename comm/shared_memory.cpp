#include "comm/shared_memory.h"

#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "comm/shm_layout.h"

namespace tessera {

namespace {

/// Of a block; its tensor begins behind.
struct BlockHead {
  std::atomic<uint32_t> lives;
};
constexpr int64_t kHeadBytes = ShmLayout::kPage;

BlockHead& head_of(const FileMapping& block) {
  return *reinterpret_cast<BlockHead*>(block.base());
}

/// Behind the storage of a shared tensor.
struct Block {
  int owner;  // pid
  int file;
  int64_t offset;
  FileMapping memory;
};

void release(void* context) noexcept {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  if (block->owner == getpid()) {
    fallocate(block->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, block->offset, block->memory.bytes());
  }
}

/// The file of this process: never closed, since tensors may be freed after the statics' end.
class OwnFile {
 public:
  std::unique_ptr<Block> take(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (owner_ != getpid()) {
      // The parent's goes on without this process.
      file_ = FileDescriptor::in_memory("tessera_shared");
      owner_ = getpid();
      end_ = 0;
    }
    const int64_t size = ShmLayout::round_up(kHeadBytes + bytes, ShmLayout::kMapAlignment);
    file_.resize(end_ + size);
    auto block = std::make_unique<Block>(Block{owner_, file_.number(), end_, FileMapping(file_, end_, size)});
    end_ += size;
    head_of(block->memory).lives.store(1);
    return block;
  }

  static OwnFile& get() {
    static auto* const file = new OwnFile();
    return *file;
  }

 private:
  std::mutex mutex_;
  int owner_ = -1;
  FileDescriptor file_;
  int64_t end_ = 0;
};

std::atomic<int64_t> mapped_bytes = 0;

}  // namespace

at::Tensor shared_zeros(int64_t numel, at::ScalarType dtype) {
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  Block* const block = OwnFile::get().take(bytes).release();
  at::DataPtr data(block->memory.base() + kHeadBytes, block, release, c10::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), /*allocator=*/nullptr,
                       /*resizable=*/false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                         c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return tensor;
}

std::optional<SharedPlace> shared_place(const at::Tensor& tensor) {
  const auto& data = tensor.storage().data_ptr();
  if (data.get_deleter() != release) {
    return std::nullopt;
  }
  const auto& block = *static_cast<const Block*>(data.get_context());
  if (block.owner != getpid()) {
    return std::nullopt;
  }
  return SharedPlace{.file = block.file,
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
      file_ = FileDescriptor::open("opening a peer's shared memory", fmt::format("/proc/{}/fd/{}", pid_, place.file));
    }
    FileMapping block(file_, place.block, place.block_bytes, FileMapping::Access::Read);
    found = blocks_.emplace(place.block, std::move(block)).first;
    mapped_bytes += place.block_bytes;
  }
  return found->second.base() + place.offset;
}

bool PeerMemory::is_alive(const SharedPlace& place) const {
  std::atomic_thread_fence(std::memory_order_acquire);
  return head_of(blocks_.at(place.block)).lives.load() == 1;
}

void PeerMemory::drop_dead() {
  for (auto block = blocks_.begin(); block != blocks_.end();) {
    if (head_of(block->second).lives.load() == 1) {
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

}  // namespace tessera
