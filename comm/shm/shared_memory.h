#pragma once
// Memory of this process that other processes of the host read in place.
//
// It is part of one memfd, which has no name and disappears with the last process that has it open or mapped. A tensor
// that stays (shared_zeros) has its own block, at an offset that is never reused. When it is freed, its pages return to
// the system, even if peers still map them; these then find a 0 in the block's head.
//
// Temporary tensors, such as gradients, use blocks that are reused (shared_block), so that neither this process nor its
// peers map them again. A block's head counts its uses, so a reader can check afterwards that the data was still valid.
//
//   | head: whether the block is alive, and its use count | the tensor |

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>

#include "comm/shm/file_memory.h"

namespace tessera {

/// Location of an address of this process, for peers.
struct SharedPlace {
  int32_t file = -1;  // file descriptor in the owner's process
  uint32_t use = 0;   // use count of the block
  int64_t block = 0;  // in the file; in bytes, as the next two
  int64_t block_bytes = 0;
  int64_t offset = 0;  // in the block
};

/// Makes a CPU tensor of zeros in shared memory. A child after fork() gets its own memory for new tensors; inherited
/// ones are shared with its parent, but not by the child with peers. Throws CommError if the system has no such memory,
/// or if its file would exceed `ulimit -f`, as blocks that are not reused get new offsets.
/// Thread safety: any number of threads.
at::Tensor shared_zeros(int64_t numel, at::ScalarType dtype);

/// Returns uninitialized memory from a free block or a new one. Free blocks are kept while all blocks together have at
/// most five quarters of the bytes that were in use at one time. Thread safety and errors: see shared_zeros.
at::DataPtr shared_block(int64_t bytes);
/// Frees the block whose memory begins at `data`, for users of c10::Allocator::raw_allocate(). Returns false if there
/// is none.
bool free_shared_block(void* data);
/// Returns the free blocks to the system.
void trim_shared_blocks();

/// Returns the location of a tensor or view in this memory, or nullopt.
std::optional<SharedPlace> shared_place(const at::Tensor& tensor);

/// Blocks of one peer that this process has mapped. Thread safety: one thread at a time.
class PeerMemory {
 public:
  explicit PeerMemory(int pid) : pid_(pid) {}
  PeerMemory(PeerMemory&&) noexcept = default;
  PeerMemory& operator=(PeerMemory&&) = delete;
  ~PeerMemory();

  /// Returns the address of `place`, valid while the peer's block lives. Throws CommError.
  const char* find(const SharedPlace& place);
  /// Returns whether the tensor in a found block is still alive, so that data read from it was valid.
  bool is_alive(const SharedPlace& place) const;

 private:
  void drop_dead();

  int pid_;
  FileDescriptor file_;
  std::map<int64_t, FileMapping> blocks_;  // by offset
};

/// Returns the bytes of peers' blocks that this process has mapped.
int64_t mapped_peer_bytes();
/// Returns the bytes of these that it has read, in whole pages. The system counts them as resident in every process
/// that has read them (VmRSS, VmHWM), although they exist once. Reads /proc/self/smaps, which takes milliseconds; 0
/// without it.
int64_t resident_peer_bytes();

}  // namespace tessera
