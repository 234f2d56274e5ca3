#pragma once
// Carries a DTensor from one list of placements to another by collectives.
//
//   at::Tensor full = redistribute(weight, {Replicate()});     // all-gather
//
// Differentiable: the gradient comes back in the placements of the input, a Partial input getting a
// Replicate gradient (each term's derivative is that of the sum).

#include "dtensor/dtensor_impl.h"

namespace tessera {

/// `tensor` under `placements` (same mesh; negative dims count from the end). Returns `tensor` itself if
/// nothing changes. All ranks of the mesh must call it. Throws ValueError if `tensor` is not a DTensor or
/// the placements do not fit it.
at::Tensor redistribute(const at::Tensor& tensor, Placements placements);

/// Below autograd: the local tensor of `from` brought to `to` (same mesh and sizes). Contiguous if it moved.
at::Tensor redistribute_local(const at::Tensor& local, const DTensorSpec& from, const Placements& to);

/// Placements that a gradient of a tensor with `placements` is kept in: Partial becomes Replicate.
Placements gradient_placements(const Placements& placements);

}  // namespace tessera
