#pragma once
// Which device parameters compute on that do not say it themselves: those without memory, and those that stay on the
// CPU between steps.

#include <c10/core/DeviceType.h>

namespace tessera {

/// CUDA where there is a GPU and the default group carries its tensors, as over "nccl"; else the CPU, also before there
/// is a group. The same on all ranks whose groups are set up alike.
c10::DeviceType accelerator_or_cpu();

}  // namespace tessera
