#pragma once
// Chooses the compute device for parameters that are on the meta device or offloaded.

#include <c10/core/DeviceType.h>

namespace tessera {

/// Returns CUDA if there is a GPU and the default group supports it; otherwise the CPU. Equal on all ranks.
c10::DeviceType accelerator_or_cpu();

}  // namespace tessera
