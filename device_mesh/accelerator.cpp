#include "device_mesh/accelerator.h"

#include <ATen/Context.h>

#include "comm/process_group.h"

namespace tessera {

c10::DeviceType accelerator_or_cpu() {
  return at::hasCUDA() && is_initialized() && has_backend(default_group(), at::kCUDA) ? at::kCUDA : at::kCPU;
}

}  // namespace tessera
