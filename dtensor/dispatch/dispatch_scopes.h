#pragma once
// Scopes that change what ops on DTensors may do in the calling thread.
//
//   {
//     ImplicitReplication scope;     // plain tensors next to DTensors count as replicated
//     y = x + torch::ones({3});
//   }
//   {
//     ExplicitRedistribution scope;  // an op that would have to communicate throws instead
//     y = mm(a, b);
//   }
//   {
//     ReplicateAndRun scope;         // an op without a sharding rule runs on whole tensors
//     y = my_library_op(x);
//   }
//
// A scope around backward() applies to it as well: within a scope, autograd runs a GPU's nodes in the calling thread,
// as with torch.autograd.set_multithreading_enabled(False).
// Source: torch.distributed.tensor.experimental.implicit_replication and ExplicitRedistributionContext.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <vector>

#include "device_mesh/device_mesh.h"
#include "dtensor/spec/redistribute_plan.h"

namespace tessera {

namespace detail {

/// Makes backwards run in the thread that calls them.
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

/// Treats plain tensors next to DTensors as replicated; they must be equal on all ranks. Plain tensors that an op
/// writes remain errors, except for zeros that a backward adds to, which become DTensors in any scope. The scope is
/// needed for the forward alone, since autograd saves the DTensors. A plain leaf gets a plain gradient of the whole,
/// equal on all ranks. Scopes nest. Ops on DTensors are slower inside, as their calls are boxed.
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

/// Makes an op throw StateError, with the op, its operands and the required placements, instead of redistributing
/// operands. Unless strict, only moves that communicate throw; sharding a replicated tensor and moves along an axis of
/// one rank do not. Allowed are redistribute() and full_tensor(), numbers that ranks exchange within an op whose
/// operands do not move (softmax and cross-entropy over a sharded dim), and item(), equal(), as_strided() and
/// resize_(). The innermost scope applies.
class ExplicitRedistribution {
 public:
  enum class Level { Off, Communication, Strict };

  explicit ExplicitRedistribution(bool strict = false);
  /// Sets the level of another place, for recomputation.
  explicit ExplicitRedistribution(Level level);
  ~ExplicitRedistribution();
  ExplicitRedistribution(const ExplicitRedistribution&) = delete;
  ExplicitRedistribution& operator=(const ExplicitRedistribution&) = delete;

  static Level level();
  /// Returns whether the calling thread's innermost scope forbids moving an operand on `mesh` by these steps.
  static bool forbids(const std::vector<RedistributeStep>& steps, const DeviceMesh& mesh);

 private:
  Level previous_;
  detail::BackwardInThisThread backward_;
};

/// Runs ops without a sharding rule, ATen's or a program's own, on whole tensors. Each rank gathers its operands and
/// computes the same, so results are replicated, and written operands are placed back. It is as slow, and needs as much
/// memory, as one device. The op must give equal results on all ranks. Ops that declare random draws throw
/// NotImplementedError. If the op's gradient has no rule either, backward() needs the scope too. Scopes nest; ops with
/// a rule use it.
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

/// Returns the op that the calling thread dispatches on DTensors, the innermost one, or null.
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
