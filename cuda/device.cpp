#include "cuda/device.h"

#include <cstdlib>

#include "base/error.h"

namespace tessera::cuda {

namespace {

struct DeviceCount {
  cudaError_t status;
  int count;
};

DeviceCount count_devices() noexcept {
  DeviceCount devices{cudaSuccess, 0};
  devices.status = cudaGetDeviceCount(&devices.count);
  if (devices.status != cudaSuccess) {
    devices.count = 0;
    cudaGetLastError();  // else a later call would report it
  }
  return devices;
}

/// What helps; "" where that is not known.
const char* find_remedy(cudaError_t status) {
  return status == cudaErrorNoKernelImageForDevice
             ? "; this build has kernels for other GPUs only: build with --//third_party/cuda:architectures=<this "
               "GPU's compute capability, 80 for 8.0> (docs/gpu.md)"
             : "";
}

}  // namespace

int visible_devices() noexcept {
  return count_devices().count;
}

std::string no_device_message() {
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  const DeviceCount devices = count_devices();
  return fmt::format(
      "no CUDA device is visible: the CUDA runtime says \"{}\", CUDA_VISIBLE_DEVICES is {}; look with nvidia-smi "
      "whether "
      "this machine has a GPU and a driver for CUDA {}, and in a container whether it was started with its GPUs",
      cudaGetErrorString(devices.status), visible == nullptr ? "not set" : fmt::format("\"{}\"", visible),
      CUDART_VERSION / 1000);
}

void check_cuda(cudaError_t status, const char* place) {
  TESSERA_CHECK(StateError, status == cudaSuccess, "{}: the CUDA runtime says \"{}\" ({}){}", place,
                cudaGetErrorString(status), cudaGetErrorName(status), find_remedy(status));
}

}  // namespace tessera::cuda
