#pragma once
// Root mean square normalization, optionally after adding a residual, in few passes over memory.
//
//   at::Tensor normed = rms_norm(x, weight, {.eps = 1e-6});
//   auto [sum, mlp_input] = add_rms_norm(x, attention, weight, {.eps = 1e-6});     // of x + attention
//
// On the CPU, ATen's ops keep up to three tensors of x's sizes for backward, in float32 for 16-bit inputs. These
// functions keep only x, or the sum. Source: B. Zhang, R. Sennrich, Root Mean Square Layer Normalization, 2019. Thread
// safety: any thread.

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

/// Returns x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dim. It is computed in float32 for 16-bit
/// inputs and rounded once. Operands may be DTensors; only shards of the last dim are redistributed. ATen's ops handle
/// weights with several dims, operands of different dtypes, dtypes that are not floating-point, and a backward with
/// create_graph.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, const RmsNorm& norm);

/// Returns x + residual and its norm. ATen's ops also handle operands of different sizes.
SumAndNorm add_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, const RmsNorm& norm);

}  // namespace tessera
