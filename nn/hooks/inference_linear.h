#pragma once
// Linear layer for text generation: fast for few rows, in c10::InferenceMode.
//
// There a product takes as long as the weights take to be read. MKL's and oneDNN's kernels for 2 to 16 rows need two to
// four times that (benchmarks/models/generate.cpp).

#include <ATen/core/Tensor.h>

namespace tessera::detail {

/// Returns at::linear of input [..., in], weight [out, in] and bias [out], which may be undefined.
///
/// A kernel of ours computes it in InferenceMode for at most 16 rows of plain CPU tensors in float32 or bfloat16. It
/// adds up in float32, and a row's bits do not depend on the other rows. Thread safety: any thread.
at::Tensor inference_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias);

/// Returns how many floats this CPU's vectors have: 4, 8 or 16.
int widest_lanes();

/// The kernel itself, with vectors of `lanes` floats, at most widest_lanes().
at::Tensor multiply_few_rows(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, int lanes);

}  // namespace tessera::detail
