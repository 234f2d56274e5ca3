#pragma once
// Arguments of a call on this rank's local tensors; internal to this package.

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

/// This rank's local tensors of a call's operands, in order. Those that are not redistributed are owned by the call's
/// arguments and not reference-counted: atomic operations would take 2 % of a small op.
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

/// Returns the strides of a dense tensor of `sizes` with the memory order of `strides`.
DimVector local_strides(at::IntArrayRef sizes, at::IntArrayRef strides);

/// Replaces the call's arguments on the stack by local tensors.
void put_local_arguments(const CallSignature& call, const Locals& locals, torch::jit::Stack* stack);

/// Makes empty results if this rank has no elements of any output; there is then nothing to write. Returns false if the
/// plan does not determine the results, since some are undefined.
bool make_empty_results(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan,
                        const Locals& locals, torch::jit::Stack* stack);

/// Runs the op on a few elements if this rank has none, so that it throws the same errors; see OpRule::needs_dry_run.
void dry_run_kernel(const c10::OperatorHandle& op, const CallSignature& call, const Locals& locals);

/// Runs the op on tensors of size 2 in each dim, so that errors about dtypes and numbers are thrown. For ranks that
/// compute with other numbers than the first one, which would otherwise throw alone.
void dry_run_on_size_two(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

/// Runs the op on zeros with the sizes of the first rank's shards, so that its errors are thrown. These are the
/// largest; see OpPlan::must_dry_run.
void ask_as_first_rank(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan,
                       const Locals& locals);

}  // namespace tessera
