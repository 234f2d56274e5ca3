#pragma once
// Memory that the host cannot touch by its address on the device.
//
// A block has two addresses, a fixed distance apart: the device's, at which the host has no access (a read or write
// there ends the program, as that of a GPU's memory would), and the host's, which simulated kernels use.
//
// Thread safety: for one thread at a time.

#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "testing/simulated_gpu/access_log.h"

namespace tessera::simulated_gpu {

struct MemoryBlock {
  size_t begin = 0;  // from the memory's first byte
  size_t bytes = 0;
  size_t stream = 0;  // that was current when it was allocated
  bool is_free = false;
  std::vector<size_t> recorded = {};  // streams of record_stream
  AccessLog accesses = {};
};

class DeviceMemory {
 public:
  /// Reserves addresses. Throws std::system_error.
  DeviceMemory();

  /// A block of at least this many bytes, full of 0xff (NaN in every floating type): what nobody wrote shows. As CUDA's
  /// caching allocator, one that was freed is given again to its own stream, and to no other. Throws Error (there is no
  /// more).
  void* allocate(size_t bytes, size_t stream);
  /// The block at this address of the device, and anywhere within it.
  MemoryBlock& block_of(const void* device_address);
  void free(MemoryBlock& block);

  void* host_address(const void* device_address) const;
  void* device_address(const MemoryBlock& block) const;

 private:
  char* device_ = nullptr;
  char* host_ = nullptr;
  size_t used_ = 0;
  std::map<size_t, MemoryBlock> blocks_;                           // by where they begin
  std::map<std::pair<size_t, size_t>, std::vector<size_t>> free_;  // by stream and bytes
};

}  // namespace tessera::simulated_gpu
