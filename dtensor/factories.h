#pragma once
// Creates DTensors of global `sizes`, replicated by default, without communication. Each rank creates its own shard.
// Throws ValueError for Partial and placements that do not fit, an undefined mesh, another device than the mesh's, and
// options other than dtype and requires_grad. Source: torch/distributed/tensor/_api.py.

#include <c10/core/Scalar.h>
#include <c10/core/TensorOptions.h>

#include "dtensor/dtensor.h"

namespace tessera {

at::Tensor empty(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements = {},
                 at::TensorOptions options = {});
at::Tensor zeros(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements = {},
                 at::TensorOptions options = {});
at::Tensor ones(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements = {},
                at::TensorOptions options = {});
at::Tensor full(at::IntArrayRef sizes, const at::Scalar& value, const DeviceMesh& mesh, Placements placements = {},
                at::TensorOptions options = {});

/// Draws from the rank's DTensor generator (random.h); values do not depend on the mesh.
at::Tensor rand(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements = {},
                at::TensorOptions options = {});
at::Tensor randn(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements = {},
                 at::TensorOptions options = {});

at::Tensor arange(const at::Scalar& start, const at::Scalar& end, const at::Scalar& step, const DeviceMesh& mesh,
                  Placements placements = {}, at::TensorOptions options = {});
at::Tensor linspace(const at::Scalar& start, const at::Scalar& end, int64_t steps, const DeviceMesh& mesh,
                    Placements placements = {}, at::TensorOptions options = {});

}  // namespace tessera
