#include "testing/test_devices.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <iostream>
#include <string>
#include <utility>

#include "testing/run_ranks.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

/// Prints once per test, which may request its devices repeatedly.
void print_skipped(const std::string& test) {
  static std::string last;
  if (std::exchange(last, test) != test) {
    std::cout << "skipped: " << test << ": no CUDA device is visible; it ran on the CPU alone\n";
  }
}

}  // namespace

std::vector<c10::Device> test_devices() {
  std::vector<c10::Device> devices = {c10::kCPU};
  if (c10::impl::getDeviceGuardImpl(c10::kCUDA)->deviceCount() > 0) {
    devices.emplace_back(c10::kCUDA, c10::DeviceIndex{0});
  } else {
    print_skipped(Catch::getResultCapture().getCurrentTestName());
  }
  return devices;
}

OwnStream::OwnStream(c10::Device device) {
  if (!device.is_cpu()) {
    guard_.emplace(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  }
}

void run_ranks_on_devices(int world_size, const std::function<void(int, c10::Device)>& body) {
  for (const c10::Device device : test_devices()) {
    CAPTURE(world_size, device);
    run_ranks(world_size, [&](int rank) {
      const OwnStream stream(device);
      body(rank, device);
    });
  }
}

}  // namespace tessera
