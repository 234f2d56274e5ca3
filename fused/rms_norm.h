#pragma once
// Root mean square normalization, and the sum of a residual that comes before it, in few passes over memory.
//
//   at::Tensor normed = rms_norm(x, weight, {.eps = 1e-6});
//   auto [sum, mlp_input] = add_rms_norm(x, attention, weight, {.eps = 1e-6});     // of x + attention
//
// ATen's ops on the CPU keep up to three tensors of x's sizes for backward, in float32 for 16 bits. These keep x, or
// the sum. Source: B. Zhang, R. Sennrich, Root Mean Square Layer Normalization, 2019. Thread safety: any thread.

#include <ATen/core/Tensor.h>

namespace tessera {

struct RmsNorm {
  double eps = 1e-6;         // added to the mean of squares
  double weight_offset = 0;  // added to the weight; 1 in Gemma
};

struct SumAndNorm {
  at::Tensor sum;
  at::Tensor normed;
};

/// Returns x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dim, computed in float32 for 16 bits and
/// rounded once. Operands may be DTensors; a shard of the last dim is moved, and others stay. Weights of more dims than
/// one, operands of different dtypes, and dtypes that do not float, are left to ATen's ops. A backward with
/// create_graph uses these too.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, const RmsNorm& norm);

/// Returns x + residual, and its norm. Operands of different sizes are left to ATen's ops too.
SumAndNorm add_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, const RmsNorm& norm);

}  // namespace tessera
