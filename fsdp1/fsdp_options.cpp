#include "fsdp1/fsdp_options.h"

#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <limits>

#include "base/error.h"

namespace tessera {

DeviceId::DeviceId(int64_t gpu) : device_(at::kCUDA) {
  TESSERA_CHECK(ValueError, gpu >= 0 && gpu <= std::numeric_limits<at::DeviceIndex>::max(),
                "device_id: {} is no index of a GPU; give 0 or more, or a device", gpu);
  device_.set_index(static_cast<at::DeviceIndex>(gpu));
}

at::Device DeviceId::resolved() const {
  if (!device_.is_cuda()) {
    return device_;
  }
  const int64_t gpus = at::hasCUDA() ? c10::impl::getDeviceGuardImpl(at::kCUDA)->deviceCount() : 0;
  TESSERA_CHECK(ValueError, gpus > (device_.has_index() ? device_.index() : 0),
                "device_id is {}, but this process sees {} GPUs; give the index of one of them, or at::kCPU",
                device_.str(), gpus);
  return device_.has_index() ? device_ : c10::impl::getDeviceGuardImpl(at::kCUDA)->getDevice();
}

}  // namespace tessera
