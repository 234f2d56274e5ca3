#pragma once
// Changes the placements of a DTensor with collectives.
//
//   at::Tensor full = redistribute(weight, {Replicate()});  // all-gather
//
//   auto pending = redistribute_async(x, {Replicate()});    // starts the all-gather
//   auto y = mm(a, b);
//   auto full_x = pending.wait();                           // ends it
//
// The functions support autograd: gradients get the placements of the input, with Replicate for Partial, since they are
// gradients of the tensor rather than of a term. All ranks of the mesh must call them in the same order.
// Source: DTensor.redistribute in torch/distributed/tensor/_api.py.

#include <functional>
#include <optional>

#include "comm/collectives.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/spec/redistribute_plan.h"

namespace tessera {

struct RedistributeOptions {
  /// Casts floating tensors to this dtype before anything is sent. Default: no cast.
  std::optional<at::ScalarType> forward_dtype = std::nullopt;
  /// Casts the gradient to this dtype before anything is sent, and then to the input's dtype.
  std::optional<at::ScalarType> backward_dtype = std::nullopt;
};

/// Returns `tensor` under `placements` on its mesh, or itself if nothing changes. Throws ValueError if `tensor` is not
/// a DTensor, or if placements do not fit or a dtype is not floating.
at::Tensor redistribute(const at::Tensor& tensor, Placements placements, RedistributeOptions options = {});

/// Returns `tensor` on `mesh`, such as mesh["tp"] from mesh["dp"]; both are sub-meshes of one root. Along axes that its
/// mesh lacks, all ranks must have equal values. Throws ValueError as above, without a common root, or for an axis of
/// flatten().
at::Tensor redistribute(const at::Tensor& tensor, const DeviceMesh& mesh, Placements placements,
                        RedistributeOptions options = {});

/// A plan in progress on local tensors, below autograd.
class LocalMove {
 public:
  /// Starts the plan up to its first collective.
  LocalMove(const at::Tensor& local, SpecPtr from, const Placements& to);
  /// Runs the rest and returns the new local tensor, contiguous if it moved. Must be called once.
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

/// A redistribution in progress. All ranks must wait for it, or all drop it. Thread safety: for the thread that started
/// it.
class [[nodiscard]] PendingRedistribute {
 public:
  /// Returns the result of redistribute. Must be called once.
  at::Tensor wait();

 private:
  friend PendingRedistribute redistribute_async(const at::Tensor&, Placements, RedistributeOptions);
  PendingRedistribute(at::Tensor tensor, RedistributeOptions options) : tensor_(std::move(tensor)), options_(options) {}

  at::Tensor tensor_;
  RedistributeOptions options_;
  SpecPtr result_;                 // null if nothing changes
  std::optional<LocalMove> move_;  // set with result_
};

/// Starts redistribute(tensor, placements, options), up to its first collective. Until wait(), `tensor` must not be
/// written.
PendingRedistribute redistribute_async(const at::Tensor& tensor, Placements placements,
                                       RedistributeOptions options = {});

/// Redistributes the local tensor of `from` to `to` on the same mesh, below autograd. The result is contiguous if it
/// moved.
at::Tensor redistribute_local(const at::Tensor& local, const DTensorSpec& from, const Placements& to);

/// Returns the placements of gradients of a tensor with `placements`: Partial becomes Replicate.
Placements gradient_placements(const Placements& placements);

}  // namespace tessera
