#pragma once
// Tests that need a GPU: without one they say so, and do nothing.

#include <iostream>

#include "cuda/device.h"
#include "third_party/catch2/catch.h"

namespace tessera::cuda {

/// `if (skip_without_devices(1)) return;` as the first line of such a test.
inline bool skip_without_devices(int needed) {
  const int visible = visible_devices();
  if (visible >= needed) {
    return false;
  }
  std::cout << "skipped: " << Catch::getResultCapture().getCurrentTestName() << ": "
            << (visible == 0 ? no_device_message()
                             : "needs " + std::to_string(needed) + " CUDA devices, has " + std::to_string(visible))
            << "\n";
  return true;
}

}  // namespace tessera::cuda
