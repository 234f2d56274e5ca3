#pragma once
// New DTensors. Each rank makes its own part only.
//
//   auto mask = ones({5, 3}, mesh, {Shard(0)});
//   auto noise = randn({5, 3}, mesh, {Shard(0)}, at::kDouble);    // the same global tensor on any mesh
//
// `sizes` are global; `options` give dtype and requires_grad (the device is the mesh's). No communication. Default
// placements: Replicate() on every axis. Throw ValueError for placements that do not fit or are Partial, for an empty
// mesh, and for a device in `options` that is not the mesh's, a layout that is not strided or a memory format that is
// not contiguous. Names follow torch/distributed/tensor/_api.py (torch.distributed.tensor.zeros, ...).

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

/// Uniform in [0, 1) and normal, from the rank's generator for DTensors (random.h).
at::Tensor rand(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements = {},
                at::TensorOptions options = {});
at::Tensor randn(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements = {},
                 at::TensorOptions options = {});

/// Bit for bit the part of at::arange(start, end, step): each rank makes the whole range and keeps its part.
at::Tensor arange(const at::Scalar& start, const at::Scalar& end, const at::Scalar& step, const DeviceMesh& mesh,
                  Placements placements = {}, at::TensorOptions options = {});
/// As arange: the part of at::linspace(start, end, steps).
at::Tensor linspace(const at::Scalar& start, const at::Scalar& end, int64_t steps, const DeviceMesh& mesh,
                    Placements placements = {}, at::TensorOptions options = {});

}  // namespace tessera
