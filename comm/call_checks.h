#pragma once
// Checks the tensors of a call before a backend gets them; internal to comm.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/context/collective.h"
#include "comm/process_group.h"

namespace tessera::detail {

/// Throws ValueError unless `tensor` is plain, dense and contiguous, and its memory holds its values.
void check_tensor(Collective kind, const char* role, const at::Tensor& tensor);

void check_rank(Collective kind, const char* role, int rank, int64_t size);  // throws ValueError unless rank < size

/// Returns the group's backend for `device`. Throws ValueError if there is none.
c10::intrusive_ptr<c10d::Backend> find_backend(Collective kind, c10::DeviceType device, const ProcessGroupPtr& group);

inline int64_t bytes(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

}  // namespace tessera::detail
