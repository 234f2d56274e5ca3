#pragma once
// Mixed-precision cast of a forward's inputs or outputs.

#include "nn/hooks/hook_point.h"

namespace tessera {

/// Casts tensors of a floating dtype in place; integers and bools stay.
inline void cast_floating(TensorRefs tensors, at::ScalarType dtype) {
  for (auto* tensor : tensors) {
    if (tensor->is_floating_point()) {
      *tensor = tensor->to(dtype);
    }
  }
}

}  // namespace tessera
