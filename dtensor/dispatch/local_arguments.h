#pragma once
// The arguments of a call on this rank's local tensors; internal to this package.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <vector>

#include "dtensor/dispatch/call_signature.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/local/redistribute.h"
#include "dtensor/propagation/sharding_rule.h"

namespace tessera {

/// This rank's local tensors of a call's operands, in their order. Those that stay where they are belong to the call's
/// arguments, which outlive it, and are not counted: atomic operations are 2 % of a small op.
class Locals {
 public:
  Locals(const CallSignature& call, const OpPlan& plan) {
    for (size_t i = 0; i < call.operands.size(); ++i) {
      const auto& operand = call.operands[i];
      if (!operand.dtensor) {
        tensors_.push_back(operand.tensor);
      } else if (!plan.redistribute[i]) {
        tensors_.push_back(&operand.dtensor->local);
      } else {
        moved_.reserve(call.operands.size());  // tensors_ points into it
        moved_.push_back(moved(*operand.dtensor, *plan.operands[i]));
        tensors_.push_back(&moved_.back());
      }
    }
  }
  Locals(const Locals&) = delete;
  Locals& operator=(const Locals&) = delete;

  const at::Tensor& operator[](size_t i) const { return *tensors_[i]; }

 private:
  static at::Tensor moved(const DTensorMeta& from, const DTensorSpec& to);

  c10::SmallVector<const at::Tensor*, 8> tensors_;
  std::vector<at::Tensor> moved_;
};

/// Strides of a dense tensor of `sizes` whose dims lie in memory in the order of `strides`.
DimVector local_strides(at::IntArrayRef sizes, at::IntArrayRef strides);

/// Fills the places of the call's arguments on the stack: this rank's local tensors where there were DTensors.
void put_local_arguments(const CallSignature& call, const Locals& locals, torch::jit::Stack* stack);

/// Empty results where this rank has no part of any output; a written operand then has nothing to write.
/// False if the results cannot be told from the plan: some are undefined.
bool make_empty_results(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan,
                        const Locals& locals, torch::jit::Stack* stack);

/// Calls the op on a few elements, where this rank has none, for what it throws: see OpRule::needs_dry_run.
void dry_run_kernel(const c10::OperatorHandle& op, const CallSignature& call, const Locals& locals);

/// Calls the op of a local call with tensors of two elements a dim in place of its own, for what it throws of dtypes
/// and numbers: on a rank that is about to compute with other numbers than the first one, which would throw alone.
void dry_run_on_size_two(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

/// Calls the op on zeros in place of the mesh's first rank's parts of the operands, which are the largest, for what it
/// throws: see OpPlan::must_dry_run.
void ask_as_first_rank(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan,
                       const Locals& locals);

}  // namespace tessera
