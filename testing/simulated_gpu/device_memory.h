#pragma once
// Memory that the host cannot access at its device address.
//
// A block has two addresses, a fixed distance apart: the device's, where an access by the host ends the program, as
// with a real GPU, and the host's, which simulated kernels use.
// Thread safety: one thread at a time.

#include <array>
#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "testing/simulated_gpu/access_log.h"

namespace tessera::simulated_gpu {

struct MemoryBlock {
  size_t begin = 0;  // from the first byte of the memory
  size_t bytes = 0;
  size_t stream = 0;  // current when it was allocated
  size_t graph = 0;   // that was being captured then; 0: none
  bool is_free = false;
  std::vector<size_t> recorded = {};  // streams passed to record_stream
  AccessLog accesses = {};
};

class DeviceMemory {
 public:
  /// Reserves addresses. Throws std::system_error.
  DeviceMemory();

  /// Returns a block filled with 0xff (NaN in every floating dtype), so that uninitialized reads show. Like CUDA's
  /// caching allocator, reuses a freed block only for its own stream and graph. Throws Error if memory is exhausted.
  void* allocate(size_t bytes, size_t stream, size_t graph);
  /// Returns the block that contains this device address.
  MemoryBlock& find_block(const void* device_address);
  void free(MemoryBlock& block);

  void* host_address(const void* device_address) const;
  void* device_address(const MemoryBlock& block) const;

  /// Returns the bytes of all memory, which restore() writes back.
  std::string save() const { return {host_, used_}; }
  void restore(const std::string& bytes) { bytes.copy(host_, bytes.size()); }

 private:
  char* device_ = nullptr;
  char* host_ = nullptr;
  size_t used_ = 0;
  std::map<size_t, MemoryBlock> blocks_;                       // by offset
  std::map<std::array<size_t, 3>, std::vector<size_t>> free_;  // by stream, graph and bytes
};

}  // namespace tessera::simulated_gpu
