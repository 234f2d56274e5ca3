#include "examples/train_gpt/train_device.h"

#include <vector>

#include "base/error.h"
#include "comm/nccl/cuda_devices.h"
#include "comm/nccl/nccl_backend.h"

namespace tessera::examples {

c10::DeviceType parse_device(const std::string& name) {
  TESSERA_CHECK(ValueError, name == "cpu" || name == "cuda", "--device {}: must be cpu or cuda", name);
  return name == "cpu" ? c10::DeviceType::CPU : c10::DeviceType::CUDA;
}

std::string backend_for(c10::DeviceType device) {
  return device == c10::DeviceType::CUDA ? "cpu:gloo,cuda:nccl" : "";
}

void check_is_built_for(c10::DeviceType device) {
  if (device != c10::DeviceType::CUDA) {
    return;
  }
  try {
    check_nccl_is_built();
  } catch (const NotImplementedError&) {
    throw ValueError(
        "--device cuda: this program was built without CUDA; build it with ./bazelw build --config=cuda "
        "//examples:train_gpt (docs/gpu.md), or leave --device out");
  }
}

void check_local_devices(c10::DeviceType device, int nproc) {
  if (device != c10::DeviceType::CUDA) {
    return;
  }
  DeviceReport report = report_devices(/*local_rank=*/0, /*wish=*/-1);
  std::vector<DeviceReport> ranks;
  for (report.local_rank = 0; report.local_rank < nproc; ++report.local_rank) {
    ranks.push_back(report);
  }
  try {
    choose_devices(ranks);
  } catch (const Error& error) {
    throw ValueError(fmt::format("--device cuda with --nproc {}: {}", nproc, error.what()));
  }
}

}  // namespace tessera::examples
