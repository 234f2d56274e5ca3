#pragma once
// Operands of one op as CPU tensors that share the GPU's memory, and its results as GPU tensors.
// Thread safety: one thread at a time.

#include <ATen/core/Tensor.h>

#include <map>
#include <vector>

#include "testing/simulated_gpu/gpu_state.h"

namespace tessera::simulated_gpu {

class HostTwins {
 public:
  /// Returns the CPU tensor for a GPU tensor; tensors that share a storage get twins that share one.
  at::Tensor twin(const at::Tensor& tensor, bool is_written = false);

  /// Updates sizes, strides and memory of written operands, which the op may have resized.
  void update_written();
  /// Returns the GPU tensor for `result`: an operand, a view of one, or a new tensor on `device`.
  at::Tensor result(const at::Tensor& result, c10::Device device);

  const std::vector<at::Tensor>& operands() const { return operands_; }  // empty without operands on a GPU

 private:
  struct Storage {
    c10::Storage device;
    c10::Storage host;
  };
  const Storage& find_or_add_storage(const at::Tensor& tensor);

  std::map<const c10::StorageImpl*, Storage> by_device_storage_;
  std::map<const c10::StorageImpl*, Storage> by_host_storage_;
  std::vector<at::Tensor> operands_, twins_;
  std::vector<size_t> written_;
};

}  // namespace tessera::simulated_gpu
