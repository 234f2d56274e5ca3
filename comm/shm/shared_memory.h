#pragma once
// Memory of this process that other processes of the host read where it is: what lies there needs no copy to be sent.
//
// It is parts of one memfd, which has no name in any file system and is gone with the last process that has it open or
// mapped. A tensor that stays has a block of its own, at an offset that no other ever has (shared_zeros). When it goes
// its pages go back to the system, also where peers still map them; these find a 0 in the block's head then, which is a
// page again.
//
// Tensors that come and go, as gradients do, get their memory from blocks that are used again (shared_block), so that
// neither this process nor its peers have to map them anew. A block's head counts its uses, and who has read from it
// sees there whether what was read was still what it had been told of.
//
//   | head: whether the block lives, and in which use it is | the tensor |

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>

#include "comm/shm/file_memory.h"

namespace tessera {

/// Where a peer finds what begins at some address of this process.
struct SharedPlace {
  int32_t file = -1;  // its number in the process whose memory it is
  uint32_t use = 0;   // of the block
  int64_t block = 0;  // in the file; in bytes, as are the next two
  int64_t block_bytes = 0;
  int64_t offset = 0;  // in the block
};

/// On the CPU. Thread safety: any number of threads. A child after fork() makes tensors in memory of its own. Those
/// that it inherits it shares with its parent, which sees what the child writes; peers know nothing of them from the
/// child. Throws CommError where the system has no such memory, or its file would be larger than `ulimit -f` lets it:
/// blocks that are not used again have new places in it.
at::Tensor shared_zeros(int64_t numel, at::ScalarType dtype);

/// Memory for `bytes` bytes of undefined contents, from a block that is free or a new one. When the result goes the
/// block is free again. Free ones are kept as long as all blocks together are no more than five quarters of the most
/// that were in use at one time. Thread safety and errors as above.
at::DataPtr shared_block(int64_t bytes);
/// For who knows the address alone, as the users of c10::Allocator::raw_allocate() do: frees the block whose memory
/// begins at `data`. False if none does.
bool free_shared_block(void* data);
/// Gives the free blocks back to the system.
void trim_shared_blocks();

/// Of a tensor in the memory of one of the above, or a view of one; else nullopt.
std::optional<SharedPlace> shared_place(const at::Tensor& tensor);

/// The blocks of one peer that this process has mapped. Thread safety: for one thread at a time.
class PeerMemory {
 public:
  explicit PeerMemory(int pid) : pid_(pid) {}
  PeerMemory(PeerMemory&&) noexcept = default;
  PeerMemory& operator=(PeerMemory&&) = delete;
  ~PeerMemory();

  /// What `place` of the peer names; valid until the peer's block goes. Throws CommError.
  const char* find(const SharedPlace& place);
  /// Whether the tensor in a block that was found still lives, so that what was read from it were its elements.
  bool is_alive(const SharedPlace& place) const;

 private:
  void drop_dead();

  int pid_;
  FileDescriptor file_;
  std::map<int64_t, FileMapping> blocks_;  // by their offset
};

/// Bytes of peers' blocks that this process has mapped.
int64_t mapped_peer_bytes();
/// Those of them that it has read, in whole pages: the system counts them as resident in every process that has read
/// them (VmRSS, VmHWM), though they are there once. Reads /proc/self/smaps, which takes milliseconds; 0 where there is
/// none.
int64_t resident_peer_bytes();

}  // namespace tessera
