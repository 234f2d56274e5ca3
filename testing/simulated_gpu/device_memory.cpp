#include "testing/simulated_gpu/device_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "base/error.h"

namespace tessera::simulated_gpu {

namespace {

constexpr size_t kBytes = size_t{32} << 30;  // address space; only touched pages use memory
constexpr size_t kAlignment = 512;
constexpr int kUnwritten = 0xff;

char* reserve(int protection) {
  void* memory = mmap(nullptr, kBytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "mmap of a simulated GPU's memory");
  }
  return static_cast<char*>(memory);
}

}  // namespace

DeviceMemory::DeviceMemory() : device_(reserve(PROT_NONE)), host_(reserve(PROT_READ | PROT_WRITE)) {}

void* DeviceMemory::allocate(size_t bytes, size_t stream, size_t graph) {
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  auto& free = free_[{stream, graph, bytes}];
  if (free.empty()) {
    TESSERA_CHECK(Error, used_ + bytes <= kBytes, "a simulated GPU has {} bytes in use; {} more do not fit", used_,
                  bytes);
    blocks_[used_] = {.begin = used_, .bytes = bytes, .stream = stream, .graph = graph};
    free.push_back(used_);
    used_ += bytes;
  }
  MemoryBlock& block = blocks_.at(free.back());
  free.pop_back();
  block.is_free = false;
  std::memset(host_ + block.begin, kUnwritten, bytes);
  return device_address(block);
}

MemoryBlock& DeviceMemory::find_block(const void* device_address) {
  const auto offset = static_cast<const char*>(device_address) - device_;
  TESSERA_ASSERT(offset >= 0 && static_cast<size_t>(offset) < used_, "{} is no address of a simulated GPU",
                 device_address);
  return std::prev(blocks_.upper_bound(static_cast<size_t>(offset)))->second;
}

void DeviceMemory::free(MemoryBlock& block) {
  block.is_free = true;
  block.recorded.clear();
  free_[{block.stream, block.graph, block.bytes}].push_back(block.begin);
}

void* DeviceMemory::host_address(const void* device_address) const {
  return device_address == nullptr ? nullptr : host_ + (static_cast<const char*>(device_address) - device_);
}

void* DeviceMemory::device_address(const MemoryBlock& block) const {
  return device_ + block.begin;
}

}  // namespace tessera::simulated_gpu
