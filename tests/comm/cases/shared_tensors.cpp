#include "tests/comm/cases/shared_tensors.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/collectives.h"
#include "comm/process_group.h"
#include "comm/shm/shared_memory.h"

namespace tessera::testing {

at::Tensor shared_tensor(int64_t numel) {
  const int64_t bytes = numel * static_cast<int64_t>(sizeof(float));
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, shared_block(bytes), /*allocator=*/nullptr,
                       /*resizable=*/false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                         caffe2::TypeMeta::Make<float>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return tensor;
}

TensorSegments one_part(at::Tensor tensor) {
  const int64_t numel = tensor.numel() / get_world_size();
  return std::make_shared<const std::vector<TensorSegment>>(1,
                                                            TensorSegment{.numel = numel, .tensor = std::move(tensor)});
}

int pid_of(int rank) {
  const auto pids = at::zeros({get_world_size()}, c10::kInt);
  all_gather(pids, at::full({1}, static_cast<int>(getpid()), c10::kInt), default_group());
  return pids[rank].item<int>();
}

void await_stop(int pid) {
  for (std::string text; text.find(") T ") == std::string::npos;) {
    std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
    std::getline(stat, text);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace tessera::testing
