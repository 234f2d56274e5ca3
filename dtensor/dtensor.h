#pragma once
// DTensor: an at::Tensor with global sizes that lies on a device mesh. Stock autograd, optimizers and modules work on
// it. Each op runs on the local tensors, after operands were redistributed so that its result is right.
//
//   auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
//   auto x = distribute_tensor(at::randn({5, 3}), mesh, {Shard(0)});   // ranks hold 3 and 2 rows
//   auto y = x.matmul(w).relu();                                      // a DTensor, Shard(0)
//   full_tensor(y.sum()).item<float>();                               // the same on every rank
//
// Every rank of the mesh calls the same ops in the same order. sizes(), dim() and dtype() are global; data_ptr()
// throws.
// - An op without a rule throws NotImplementedError with its name, the placements and the remedy.
// - Mixing DTensors with plain tensors, other than scalars, throws ValueError.
// docs/semantics.md has views that must move data, and values that only some ranks hold.
//
// Thread safety: as at::Tensor. Source: torch/distributed/tensor/_api.py.

#include <optional>

#include "device_mesh/device_mesh.h"
#include "dtensor/local/redistribute.h"
#include "dtensor/spec/placement.h"

namespace tessera {

/// Returns whether `tensor` is a DTensor; false for an undefined one.
bool is_dtensor(const at::Tensor& tensor);

/// Return references that live as long as `tensor`. Throw ValueError if it is not a DTensor.
const Placements& placements(const at::Tensor& tensor);
const DeviceMesh& device_mesh(const at::Tensor& tensor);

struct DistributeOptions {
  /// The rank along each axis of the mesh whose data count; the others' tensors give only sizes and dtype, the
  /// same on every rank. Unset: every rank's own data count, which must be equal, and nothing is sent.
  std::optional<int> src_data_rank = 0;
};

/// Shards or replicates `tensor`, a leaf, over `mesh`; returns a new row-major leaf. Collective.
/// Throws ValueError for placements that do not fit, Partial placements, or a DTensor.
at::Tensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, Placements placements,
                             DistributeOptions options = {});

struct FromLocalOptions {
  /// Global sizes; needed where shards are uneven, since the local sizes alone cannot tell them. Default:
  /// the local sizes with each sharded dim multiplied by its axes.
  std::optional<std::vector<int64_t>> shape = std::nullopt;
  /// Global strides, in whose order the local tensors lie on every rank, which is not checked. Default: row-major; a
  /// local tensor that is not contiguous() is copied.
  std::optional<std::vector<int64_t>> stride = std::nullopt;
  /// Compares all ranks' local sizes with `shape` and Replicate copies with the first rank's: a mismatch
  /// throws ValueError on every rank. Costs collectives.
  bool run_check = false;
  /// Placements of the gradient that reaches `local`. Default: those of the tensor; for Partial(Sum) Replicate, as each
  /// term's derivative is that of the sum; for Partial(Avg) that over the number of terms. A backward through another
  /// Partial throws NotImplementedError, unless they are given.
  std::optional<Placements> grad_placements = std::nullopt;
};

/// Makes each rank's local tensor its part of a DTensor, sharing memory where `local` is contiguous. Differentiable.
/// No communication, unless run_check.
at::Tensor from_local(const at::Tensor& local, const DeviceMesh& mesh, Placements placements,
                      FromLocalOptions options = {});

/// Returns the local tensor, which shares memory. Differentiable.
/// `grad_placements` say what the ranks' local gradients form together; default: the tensor's placements, Replicate for
/// Partial. Throws ValueError, on every rank, if they shard the tensor differently. Clone the result before an in-place
/// op where a gradient is recorded.
at::Tensor to_local(const at::Tensor& tensor, std::optional<Placements> grad_placements = std::nullopt);

/// Returns the local tensor of a DTensor that the program gives up; it may be written in place.
at::Tensor take_local(at::Tensor tensor, std::optional<Placements> grad_placements = std::nullopt);

/// Returns the whole tensor as a plain one on every rank; a plain tensor is returned as it is.
/// `grad_placements`: Replicate, the default, if the ranks' gradients are equal; Partial if they are terms of a sum.
/// The result of a replicated tensor shares its memory. Throws ValueError for an undefined tensor, and for
/// grad_placements of a plain one.
at::Tensor full_tensor(const at::Tensor& tensor, std::optional<Placements> grad_placements = std::nullopt);

}  // namespace tessera
