#pragma once
// Clips gradients of parameters on any meshes by their norm. Plain gradients must be equal on all ranks.
// Thread safety: one thread per rank; all ranks must call. Source: torch.nn.utils.

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera {

struct ClipGradNormOptions {
  double norm_type = 2.0;           // p > 0; infinity means the largest absolute value
  bool error_if_nonfinite = false;  // throw StateError on every rank; waits for the device
};

/// Returns the norm of all elements as a plain scalar. Throws ValueError if p <= 0 or meshes have different ranks.
at::Tensor get_total_norm(const std::vector<at::Tensor>& tensors, const ClipGradNormOptions& options = {});

/// Scales gradients by max_norm / (total_norm + 1e-6) if below 1. Throws ValueError if max_norm < 0.
void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm, const at::Tensor& total_norm);

/// Clips gradients and returns their norm before. Counts repeated (tied) parameters once; skips undefined gradients.
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           const ClipGradNormOptions& options = {});

}  // namespace tessera
