#pragma once
// The operands of one op as tensors of the CPU that share the GPU's memory, and its results as the GPU's again.
//
// Thread safety: for one thread at a time.

#include <ATen/core/Tensor.h>

#include <map>
#include <vector>

#include "testing/simulated_gpu/gpu_state.h"

namespace tessera::simulated_gpu {

class HostTwins {
 public:
  /// The CPU's tensor for one on a GPU; tensors that share a storage get twins that share one.
  at::Tensor twin(const at::Tensor& tensor, bool is_written = false);

  /// Takes sizes, strides and memory of what was written over, which the op may have resized.
  void update_written();
  /// What `result` of the op stands for: an operand itself, a view of one, or a new tensor on `device`.
  at::Tensor result(const at::Tensor& result, c10::Device device);

  /// Empty: the op has no operand on a GPU.
  const std::vector<at::Tensor>& operands() const { return operands_; }

 private:
  struct Storage {
    c10::Storage device;
    c10::Storage host;
  };
  const Storage& storage_of(const at::Tensor& tensor);

  std::map<const c10::StorageImpl*, Storage> by_device_storage_;
  std::map<const c10::StorageImpl*, Storage> by_host_storage_;
  std::vector<at::Tensor> operands_, twins_;
  std::vector<size_t> written_;
};

}  // namespace tessera::simulated_gpu
