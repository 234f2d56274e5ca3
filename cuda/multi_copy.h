#pragma once
// Many strided copies between CUDA tensors, with a cast, in as few kernels as fit: the copy-out of an all-gather's
// buffer into parameters, and the copy-in of gradients, with padding, for a reduce-scatter.
//
//   MultiCopy copy_out(at::kFloat, at::kBFloat16);   // to float parameters from a bfloat16 buffer
//   // A weight [5, 3] cut into chunks of 3 rows over 2 ranks, whose shards are 24 elements of the buffer each:
//   copy_out.add(weight, gathered, {.to_stride = 9, .from_stride = 24, .rows = 1, .cols = 9});
//   copy_out.add(weight, gathered, {.to_offset = 9, .from_offset = 24, .rows = 1, .cols = 6});
//   copy_out.run();
//
//   MultiCopy copy_in(at::kBFloat16, at::kFloat);
//   copy_in.add(buffer, gradient, ...);
//   copy_in.add_zeros(buffer, 15, 9);
//   copy_in.run();
//
// A launch takes 64 copies (strided_copy.h), as arguments: nothing is sent to the GPU before it, nothing is allocated,
// and the host waits for nothing. Values are what Tensor::copy_ gives: round to nearest even, through float32.
// Kernels go to the current stream. Whoever frees or writes a tensor on another stream orders that himself.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "cuda/copy_shape.h"
#include "cuda/strided_copy.h"

namespace tessera::cuda {

/// Thread safety: for one thread at a time.
class MultiCopy {
 public:
  /// Equal dtypes of any kind, or two of float32, bfloat16 and float16. Throws NotImplementedError.
  MultiCopy(at::ScalarType to, at::ScalarType from);

  /// Tensors are contiguous, on one CUDA device, of the dtypes above, and stay until run(); copies of one run() do not
  /// write what another one reads or writes. Throws ValueError for a tensor that is not so, or a shape that leaves it.
  void add(const at::Tensor& to, const at::Tensor& from, const CopyShape& shape);
  /// Elements [offset, offset + numel) of `to` become 0.
  void add_zeros(const at::Tensor& to, int64_t offset, int64_t numel);
  /// Launches what was added, and forgets it. Throws StateError (the CUDA runtime refuses).
  void run();

 private:
  void check(const at::Tensor& tensor, at::ScalarType dtype, const char* role);
  void push(const StridedCopy& copy);

  const at::ScalarType to_, from_;
  c10::Device device_{c10::kCPU};  // until the first tensor
  std::vector<CopyTable> tables_;
};

/// Whether MultiCopy has it.
bool can_copy(at::ScalarType to, at::ScalarType from);

}  // namespace tessera::cuda
