#pragma once
// Availability of GPUs, and errors of the CUDA runtime.

#include <cuda_runtime_api.h>

#include <string>

namespace tessera::cuda {

/// Returns the number of GPUs that this process sees, or 0 without a driver. Does not throw.
int visible_devices() noexcept;

/// Returns why visible_devices() is 0: "no CUDA device is visible: <the runtime's message>; <remedy>".
std::string no_device_message();

/// Throws StateError with `place` and a known remedy unless the status is cudaSuccess.
void check_cuda(cudaError_t status, const char* place);

}  // namespace tessera::cuda
