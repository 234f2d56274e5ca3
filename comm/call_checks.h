#pragma once
// What collectives and messages check before they hand their tensors to a backend; internal to comm.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/context/collective.h"
#include "comm/process_group.h"

namespace tessera::detail {

/// Throws ValueError unless `tensor`, the call's `role`, is dense and contiguous, and its memory holds its values.
void check_tensor(Collective kind, const char* role, const at::Tensor& tensor);

/// Throws ValueError unless a group of `size` has `rank`, which is the call's `role`.
void check_rank(Collective kind, const char* role, int rank, int64_t size);

/// The group's backend for tensors on `device`. Throws ValueError if there is none.
c10::intrusive_ptr<c10d::Backend> backend_of(Collective kind, c10::DeviceType device, const ProcessGroupPtr& group);

inline int64_t bytes(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

}  // namespace tessera::detail
