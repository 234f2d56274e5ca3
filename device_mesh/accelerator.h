#pragma once
// The device that parameters on the meta device, and offloaded ones, compute on.

#include <c10/core/DeviceType.h>

namespace tessera {

/// Returns CUDA where there is a GPU and the default group carries its tensors; else the CPU. The same on all ranks.
c10::DeviceType accelerator_or_cpu();

}  // namespace tessera
