#pragma once
// DTensor: a tensor that lies on a device mesh. It is an at::Tensor (there is no other type) with global
// sizes; stock autograd, optimizers and modules work on it, and each op runs on the local tensors after the
// operands were brought into placements that make its result right.
//
//   auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
//   auto x = distribute_tensor(at::randn({5, 3}), mesh, {Shard(0)});   // ranks hold 3 and 2 rows
//   auto y = x.matmul(w).relu();                                      // a DTensor, Shard(0)
//   full_tensor(y.sum()).item<float>();                               // the same on every rank
//
// Every rank of the mesh must call the same ops in the same order. An op that the library has no rule for
// throws NotImplementedError with the op's name, the placements and the remedy; mixing DTensors with plain
// tensors (other than scalars) throws ValueError. sizes(), dim(), dtype() are those of the global tensor;
// data_ptr() throws.
//
// What an op refuses of dtypes, sizes and numbers it refuses on every rank. Of values in tensors (an index out of
// range, an integer to be divided by zero) only the ranks that hold them know: these throw, and the others go on, up to
// a collective that waits for them in vain. Check such values before they are sharded.
//
// A view shares memory with the viewed tensor, unless it cuts a shard, so that its data have to move. Such a view is a
// copy. A write to it (x.select(0, 3).zero_(), x.slice(0, 1, 3).add_(y)) reaches the viewed tensor too where slices of
// dims are what was taken; else, as of a diagonal, and in InferenceMode it throws NotImplementedError. Once the viewed
// tensor was written otherwise, using the view throws StateError. In InferenceMode, where tensors do not count writes,
// and after a write through data() or to_local() of another view, it has the old values instead: take the view again.
//
// Thread safety: as at::Tensor. Names and meaning follow torch/distributed/tensor/_api.py.

#include <optional>

#include "device_mesh/device_mesh.h"
#include "dtensor/local/redistribute.h"
#include "dtensor/spec/placement.h"

namespace tessera {

/// False for an undefined tensor.
bool is_dtensor(const at::Tensor& tensor);

/// Throw ValueError if `tensor` is not a DTensor. The references live as long as the tensor.
const Placements& placements(const at::Tensor& tensor);
const DeviceMesh& device_mesh(const at::Tensor& tensor);

struct DistributeOptions {
  /// The rank along each axis of the mesh whose data count; the others' tensors give only sizes and dtype, the
  /// same on every rank. Unset: every rank's own data count, which must be equal, and nothing is sent.
  std::optional<int> src_data_rank = 0;
};

/// Cuts or copies `tensor` over `mesh`. `tensor` must be a leaf (or need no gradient); the result is a new leaf
/// that needs a gradient if `tensor` does. The global strides are row-major, whatever those of `tensor` are.
/// All ranks must call.
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

/// Each rank's local tensor becomes its part of a DTensor. No communication (unless run_check), and no copy of what is
/// contiguous or comes with options.stride: they share memory, and a backward that needs what either was throws if the
/// other was written. Differentiable: the gradient of the DTensor reaches `local`.
at::Tensor from_local(const at::Tensor& local, const DeviceMesh& mesh, Placements placements,
                      FromLocalOptions options = {});

/// The local tensor, sharing memory. Differentiable; `grad_placements` say what the local gradients form
/// together (default: the tensor's placements, Replicate for Partial). Throws ValueError, on every rank, where a
/// gradient is recorded and they cut the tensor otherwise than its placements do.
/// Where a gradient is recorded, an in-place op on the result, or its use after the DTensor was written, is an error of
/// autograd ("a view ... created inside a custom Function"), as in PyTorch: the DTensor would not know of the write.
/// clone() it first. Without a gradient, as under NoGradGuard, it may be written, and the DTensor has what was written.
at::Tensor to_local(const at::Tensor& tensor, std::optional<Placements> grad_placements = std::nullopt);

/// to_local of a DTensor that the program gives up, as one that redistribute() or an op has just made: the result may
/// be written in place.
at::Tensor take_local(at::Tensor tensor, std::optional<Placements> grad_placements = std::nullopt);

/// The whole tensor as a plain one on every rank: redistribute to Replicate, then to_local with
/// `grad_placements` (default: Replicate, the ranks' gradients are equal; Partial: they are terms of the gradient).
/// It shares memory with a tensor that is replicated already, and what to_local() says of in-place ops holds then.
/// A plain tensor is returned as it is, so that a parameter of fully_shard can be read whether it is gathered or not.
/// Throws ValueError for an undefined tensor, and for grad_placements of a plain one.
at::Tensor full_tensor(const at::Tensor& tensor, std::optional<Placements> grad_placements = std::nullopt);

}  // namespace tessera
