#pragma once
// Scopes that change what ops on DTensors may do, for the calling thread.
//
//   {
//     ImplicitReplication scope;             // plain tensors beside DTensors count as replicated
//     y = x + torch::ones({3});
//   }
//   {
//     ExplicitRedistribution scope;          // an op that would have to communicate throws instead
//     y = mm(a, b);
//   }
//   {
//     ReplicateAndRun scope;                 // an op that has no sharding rule runs on whole tensors
//     y = my_library_op(x);
//   }
//
// After torch.distributed.tensor.experimental.implicit_replication and ExplicitRedistributionContext. A scope around
// backward() holds for it too: while there is one, autograd runs the nodes of a GPU in the thread that calls
// backward(), too, as torch.autograd.set_multithreading_enabled(False) has it.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <vector>

#include "device_mesh/device_mesh.h"
#include "dtensor/spec/redistribute_plan.h"

namespace tessera {

namespace detail {

/// For its lifetime a backward runs in the thread that calls it.
class BackwardInThisThread {
 public:
  BackwardInThisThread();
  ~BackwardInThisThread();
  BackwardInThisThread(const BackwardInThisThread&) = delete;
  BackwardInThisThread& operator=(const BackwardInThisThread&) = delete;

 private:
  bool previous_;
};

}  // namespace detail

/// A plain tensor that meets DTensors in an op counts as a replicated one, and must be equal on every rank. One that
/// the op writes is still an error, but for zeros that a backward adds to, which become a DTensor in any scope or none.
/// Needed around the forward alone: what autograd saves are the DTensors. A plain leaf gets a plain gradient, that of
/// the whole, the same on every rank. Scopes nest; in one, ops on DTensors cost more (their calls are boxed).
class ImplicitReplication {
 public:
  ImplicitReplication();
  ~ImplicitReplication();
  ImplicitReplication(const ImplicitReplication&) = delete;
  ImplicitReplication& operator=(const ImplicitReplication&) = delete;

  static bool active();

 private:
  bool was_active_;
  detail::BackwardInThisThread backward_;
};

/// An op whose operands would have to be redistributed throws a StateError that names it, its operands and the
/// placements that it needs. Not strict: only moves that communicate are refused; cutting a replicated tensor, or a
/// move along an axis of one rank, is not. redistribute() itself and full_tensor() are explicit and allowed. So are
/// numbers that an op's ranks exchange inside of it where no operand moves (softmax and cross-entropy over a cut dim),
/// and what reads a whole tensor by itself: item(), equal(), as_strided() and resize_(). The innermost scope counts.
class ExplicitRedistribution {
 public:
  enum class Level { Off, Communication, Strict };

  explicit ExplicitRedistribution(bool strict = false);
  /// The level of another place: who computes something again does so as it was.
  explicit ExplicitRedistribution(Level level);
  ~ExplicitRedistribution();
  ExplicitRedistribution(const ExplicitRedistribution&) = delete;
  ExplicitRedistribution& operator=(const ExplicitRedistribution&) = delete;

  static Level level();
  /// Whether the calling thread's innermost scope refuses to move an operand on `mesh` by these steps.
  static bool forbids(const std::vector<RedistributeStep>& steps, const DeviceMesh& mesh);

 private:
  Level previous_;
  detail::BackwardInThisThread backward_;
};

/// An op without a sharding rule, ATen's or a program's own, runs all the same: each rank gathers its operands whole
/// and computes the same, so the results are replicated, and what it writes goes back to where it was. As slow, and as
/// large, as on one device; it must give the same on every rank. Ops that say that they draw random numbers are refused
/// with a NotImplementedError. Where the op's gradient is such an op too, the scope is needed around backward() as
/// well. Scopes nest; ops that have a rule run by it.
class ReplicateAndRun {
 public:
  ReplicateAndRun();
  ~ReplicateAndRun();
  ReplicateAndRun(const ReplicateAndRun&) = delete;
  ReplicateAndRun& operator=(const ReplicateAndRun&) = delete;

  static bool active();

 private:
  detail::BackwardInThisThread backward_;
};

/// The op that the calling thread dispatches on DTensors now, innermost; null outside of one.
const c10::OperatorHandle* dispatching_op();

/// Sets dispatching_op for its lifetime. For dispatch.cpp and unboxed_dispatch.cpp.
class DispatchingOp {
 public:
  explicit DispatchingOp(const c10::OperatorHandle& op);
  ~DispatchingOp();
  DispatchingOp(const DispatchingOp&) = delete;
  DispatchingOp& operator=(const DispatchingOp&) = delete;

 private:
  const c10::OperatorHandle* previous_;
};

}  // namespace tessera
