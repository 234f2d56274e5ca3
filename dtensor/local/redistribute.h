#pragma once
// Carries a DTensor from one list of placements to another by collectives.
//
//   at::Tensor full = redistribute(weight, {Replicate()});     // all-gather
//
//   auto pending = redistribute_async(x, {Replicate()});       // the all-gather starts ...
//   auto y = mm(a, b);
//   auto full_x = pending.wait();                              // ... and ends here
//
// Differentiable: the gradient comes back in the placements of the input, for a Partial one Replicate: it is that of
// the tensor, not of a term.
//
// All ranks of the mesh must call the functions below in the same order.
// Names and meaning follow DTensor.redistribute in torch/distributed/tensor/_api.py.

#include <functional>
#include <optional>

#include "comm/collectives.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/spec/redistribute_plan.h"

namespace tessera {

struct RedistributeOptions {
  /// Floating tensors are cast to it before anything is sent, and so is the result. Default: as they are.
  std::optional<at::ScalarType> forward_dtype = std::nullopt;
  /// The gradient is cast to it before anything is sent, and then to the dtype of the input.
  std::optional<at::ScalarType> backward_dtype = std::nullopt;
};

/// `tensor` under `placements` (same mesh; negative dims count from the end). Returns `tensor` itself if
/// nothing changes. Throws ValueError if `tensor` is not a DTensor, the placements do not fit it or a dtype
/// in the options is not floating.
at::Tensor redistribute(const at::Tensor& tensor, Placements placements, RedistributeOptions options = {});

/// `tensor` on `mesh`, where its mesh and `mesh` are sub-meshes of one root (or the root itself), such as
/// mesh["tp"] and mesh["dp"]. Along the axes that its own mesh lacks all ranks must hold the same values.
/// Throws ValueError as above, or if the meshes have no root in common or an axis made by flatten.
at::Tensor redistribute(const at::Tensor& tensor, const DeviceMesh& mesh, Placements placements,
                        RedistributeOptions options = {});

/// A plan under way on the local tensors: below autograd.
class LocalMove {
 public:
  /// Starts the plan from `from` to `to` up to its first collective.
  LocalMove(const at::Tensor& local, SpecPtr from, const Placements& to);
  /// Runs the rest; the new local tensor, contiguous if it moved. Call it once.
  at::Tensor wait();

 private:
  void start_next();

  SpecPtr from_;
  Placements current_;
  std::vector<RedistributeStep> steps_;
  size_t next_ = 0;
  at::Tensor local_;
  Pending collective_;
  std::function<at::Tensor()> finish_;
};

/// A redistribution under way. Every rank waits for it, or all drop it.
/// Thread safety: for the thread that started it.
class [[nodiscard]] PendingRedistribute {
 public:
  /// What redistribute would have returned. Call it once.
  at::Tensor wait();

 private:
  friend PendingRedistribute redistribute_async(const at::Tensor&, Placements, RedistributeOptions);
  PendingRedistribute(at::Tensor tensor, RedistributeOptions options) : tensor_(std::move(tensor)), options_(options) {}

  at::Tensor tensor_;
  RedistributeOptions options_;
  SpecPtr result_;                 // null: nothing changes
  std::optional<LocalMove> move_;  // set with result_
};

/// Starts redistribute(tensor, placements, options): its first collective runs until wait(). Until then `tensor` may be
/// read, but not written.
PendingRedistribute redistribute_async(const at::Tensor& tensor, Placements placements,
                                       RedistributeOptions options = {});

/// Below autograd: the local tensor of `from` brought to `to` (same mesh and sizes). Contiguous if it moved.
at::Tensor redistribute_local(const at::Tensor& local, const DTensorSpec& from, const Placements& to);

/// Placements that a gradient of a tensor with `placements` is kept in: Partial becomes Replicate.
Placements gradient_placements(const Placements& placements);

}  // namespace tessera
