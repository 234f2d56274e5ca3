#pragma once
// Batches many strided copies between CUDA tensors, with a cast, into few kernels. Used for copy-out from an
// all-gather's buffer, and padded copy-in for a reduce-scatter.
//
//   MultiCopy copy_out(at::kFloat, at::kBFloat16);  // to float parameters from a bfloat16 buffer
//   // A weight [5, 3] in chunks of 3 rows over 2 ranks, whose shards have 24 elements of the buffer each:
//   copy_out.add(weight, gathered, {.to_stride = 9, .from_stride = 24, .rows = 1, .cols = 9});
//   copy_out.add(weight, gathered, {.to_offset = 9, .from_offset = 24, .rows = 1, .cols = 6});
//   copy_out.run();
//
// A launch takes 64 copies as arguments, on the current stream. Nothing is allocated or sent beforehand, and the host
// does not wait. Values equal those of Tensor::copy_: rounded to nearest even, through float32.
// Thread safety: one thread at a time. Callers order writes and frees on other streams.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "cuda/copy_shape.h"
#include "cuda/strided_copy.h"

namespace tessera::cuda {

class MultiCopy {
 public:
  /// Takes equal dtypes of any kind, or two of float32, bfloat16 and float16. Throws NotImplementedError otherwise.
  MultiCopy(at::ScalarType to, at::ScalarType from);

  /// Adds a copy between contiguous tensors of these dtypes on one CUDA device, which must live until run(). A copy
  /// must not write what another one reads or writes. Throws ValueError if tensors or the shape do not fit.
  void add(const at::Tensor& to, const at::Tensor& from, const CopyShape& shape);
  void add_zeros(const at::Tensor& to, int64_t offset, int64_t numel);  // elements [offset, offset + numel)
  /// Launches and clears the added copies. Throws StateError if the CUDA runtime fails.
  void run();

 private:
  void check(const at::Tensor& tensor, at::ScalarType dtype, const char* role);
  void push(const StridedCopy& copy);

  const at::ScalarType to_, from_;
  c10::Device device_{c10::kCPU};  // until the first tensor is added
  std::vector<CopyTable> tables_;
};

/// Returns whether MultiCopy supports the dtypes.
bool can_copy(at::ScalarType to, at::ScalarType from);

}  // namespace tessera::cuda
