#pragma once
// Whether there is a GPU to work on, and what the CUDA runtime answers.

#include <cuda_runtime_api.h>

#include <string>

namespace tessera::cuda {

/// GPUs that this process sees; 0 without a driver. Throws nothing.
int visible_devices() noexcept;

/// Why visible_devices() is 0: "no CUDA device is visible: <what the runtime says>; <remedy>".
std::string no_device_message();

/// Throws StateError naming `place`, and the remedy where one is known, unless it is cudaSuccess.
void check_cuda(cudaError_t status, const char* place);

}  // namespace tessera::cuda
