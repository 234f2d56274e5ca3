#pragma once
// Gradient clipping for models whose parameters lie on different meshes: fully_shard over {dp} leaves some parameters
// there, and puts those that a tensor-parallel plan has cut on {dp, tp}. torch::nn::utils::clip_grad_norm_ cannot add
// up their norms; where all parameters are on one mesh it works too, and gives the same.
//
//   loss.backward();
//   const at::Tensor norm = clip_grad_norm_(model->parameters(), 1.0);     // before clipping, the same on every rank
//   optimizer.step();
//
// Gradients may be plain, DTensors in any placements, and of several dtypes. Plain gradients must be equal on all
// ranks. Collective, with one reduction of one number for each mesh and combination of sharded axes.
//
// Thread safety: one thread per rank. Source: torch.nn.utils.

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera {

struct ClipGradNormOptions {
  /// The p of the norm, above 0; infinity: the largest absolute value.
  double norm_type = 2.0;
  /// A norm that is infinite or NaN throws a StateError, on every rank, before anything is scaled. Waits for the
  /// device.
  bool error_if_nonfinite = false;
};

/// The p-norm of all elements of `tensors` together, as a plain tensor without dims: float32, or float64 if a tensor
/// is. 0 for no tensors. On CUDA (--config=cuda) the 1-, 2- and infinity-norms of shards are those of one kernel for
/// many tensors (dtensor/kernel_norm.h). Throws ValueError for a norm_type that is not above 0.
at::Tensor get_total_norm(const std::vector<at::Tensor>& tensors, const ClipGradNormOptions& options = {});

/// Multiplies the gradients by max_norm / (total_norm + 1e-6) where that is below 1, that of a parameter that is given
/// several times once. No communication.
/// Throws ValueError if max_norm is negative.
void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm, const at::Tensor& total_norm);

/// Both: the norm of the gradients of `parameters` (those without one are left out), and clipping by it. A parameter
/// that is given several times counts once: libtorch's parameters() lists tied ones under each of their names.
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           const ClipGradNormOptions& options = {});

}  // namespace tessera
