#include "examples/train_gpt/peak_memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <fstream>
#include <string>

#include "base/error.h"
#include "comm/shm/shared_memory.h"

namespace tessera::examples {

namespace {

double peak_resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "VmHWM:") {
      double kib = 0;
      status >> kib;
      return kib * 1024 - static_cast<double>(resident_peer_bytes());
    }
  }
  throw Error("the peak memory of a rank: /proc/self/status has no VmHWM; is /proc mounted?");
}

// Uses c10's interface, which needs no CUDA header.
double peak_allocated_bytes(c10::DeviceType device) {
  const c10::DeviceIndex current = c10::impl::getDeviceGuardImpl(device)->getDevice().index();
  const auto stats = c10::getDeviceAllocator(device)->getDeviceStats(current);
  constexpr auto kAllPools = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return static_cast<double>(stats.allocated_bytes[kAllPools].peak);
}

}  // namespace

double peak_memory_bytes(c10::DeviceType device) {
  return device == c10::DeviceType::CPU ? peak_resident_bytes() : peak_allocated_bytes(device);
}

const char* peak_memory_kind(c10::DeviceType device) {
  return device == c10::DeviceType::CPU ? "resident" : "allocated by tensors on the GPU";
}

}  // namespace tessera::examples
