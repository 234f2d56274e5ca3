#pragma once
// BlockCopier: runs the copies of param_layout.h between a unit's flat buffer and its parameters or gradients.
//
//   for (i ...) copier.from_flat(params[i], gathered, copies[i]);   // copy-out of an all-gather
//   copier.run();
//
// On the CPU, copies of one dtype use memcpy, without the overhead of ops. On a GPU, all copies and zeros are one
// kernel (kernel_copies.h). Otherwise they are one _foreach_copy_, which includes the cast.

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "fully_shard/layout/kernel_copies.h"
#include "fully_shard/layout/param_layout.h"

namespace tessera {

/// Collects copies between contiguous tensors. Version counters do not change. Do not read results before run().
class BlockCopier {
 public:
  void from_flat(const at::Tensor& param, const at::Tensor& flat, std::span<const BlockCopy> copies);
  void to_flat(const at::Tensor& param, const at::Tensor& flat, std::span<const BlockCopy> copies);
  /// Sets the ranges of `flat` to zero.
  void zero(const at::Tensor& flat, std::span<const FlatRange> ranges);
  void run();

 private:
  void add(const at::Tensor& to, const at::Tensor& from, const CopyShape& shape);

  std::vector<TensorCopy> copies_;  // started by run()
};

}  // namespace tessera
