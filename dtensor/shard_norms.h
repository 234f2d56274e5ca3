#pragma once
// The norms of DTensors as few norms of local tensors: those that are cut over the same axes are one list, for a kernel
// that takes many tensors at once (kernel_norm.h).
//
//   weight   Float[5, 7] (Shard(0), Shard(1))    ┐ one norm: a Float[] (NormPartial(2), NormPartial(2)), whose
//   other    Float[6, 4] (Shard(0, 1), Shard(0)) ┘ terms are the ranks' norms of both tensors' shards
//   bias     Float[7] (Replicate(), Shard(0))      another one: Float[] (Replicate(), NormPartial(2))

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tessera {

/// The p-norm of all elements of local tensors together, as a tensor without dims. They are contiguous, on one device
/// and of one dtype; some, or all, may be empty.
using LocalNorm = std::function<at::Tensor(at::TensorList locals)>;

/// DTensors without dims, of `dtype`, on the mesh of `tensors`, whose p-norm together is that of all elements. No
/// communication. `tensors`: DTensors of one mesh, none of them Partial; p is above 0. As many norms on every rank.
/// Throws StateError for a stale view, as ops do.
std::vector<at::Tensor> norms_of_shards(const std::vector<at::Tensor>& tensors, double p, at::ScalarType dtype,
                                        const LocalNorm& local_norm);

}  // namespace tessera
