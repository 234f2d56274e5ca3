#pragma once
// DTensors whose parts a test chooses.

#include "dtensor/dtensor.h"

namespace tessera {

/// A DTensor of these placements: cut along the sharded axes is `term`, which along the pending axes is what this
/// rank's coordinate contributes. It has the sizes of the whole and is copied. All ranks call.
at::Tensor from_term(const at::Tensor& term, const DeviceMesh& mesh, const Placements& placements);

}  // namespace tessera
