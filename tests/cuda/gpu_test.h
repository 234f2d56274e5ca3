#pragma once
// Tests that need a GPU: without one they say so, and do nothing.

#include <iostream>
#include <string>

#include "cuda/device.h"
#include "third_party/catch2/catch.h"

namespace tessera::cuda {

inline void print_skipped(const std::string& reason) {
  std::cout << "skipped: " << Catch::getResultCapture().getCurrentTestName() << ": " << reason << "\n";
}

/// `if (skip_without_devices(1)) return;` as the first line of such a test.
inline bool skip_without_devices(int needed) {
  const int visible = visible_devices();
  if (visible >= needed) {
    return false;
  }
  print_skipped(visible == 0 ? no_device_message()
                             : "needs " + std::to_string(needed) + " CUDA devices, has " + std::to_string(visible));
  return true;
}

/// The same for tests of what happens without a GPU.
inline bool skip_with_devices() {
  if (visible_devices() == 0) {
    return false;
  }
  print_skipped("needs a machine without CUDA devices");
  return true;
}

}  // namespace tessera::cuda
