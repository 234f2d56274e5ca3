#pragma once
// Which memory a tensor lies in.

#include <ATen/core/Tensor.h>

namespace tessera {

/// The same for all tensors that share memory, of a DTensor that of its local tensor. Null where there is none, as of a
/// sparse tensor.
const void* memory_of(const at::Tensor& tensor);

}  // namespace tessera
