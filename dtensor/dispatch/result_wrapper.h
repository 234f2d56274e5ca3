#pragma once
// Wraps an op's local results in DTensors; internal to this package.

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include "dtensor/dispatch/call_signature.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/propagation/sharding_rule.h"

namespace tessera {

/// Returns the spec of result `next`; if the plan does not determine it, replicated with the result's sizes.
SpecPtr spec_of_result(const OpPlan& plan, size_t next, const at::Tensor& result);

/// Returns `local`, or a copy with the memory order of the whole tensor's dims.
at::Tensor laid_out_as(at::Tensor local, const TensorMeta& whole);

/// Makes DTensors of an op's results. Views record their offset in the viewed tensor, like autograd's own views.
struct ResultWrapper {
  const CallSignature& call;
  const OpPlan& plan;
  size_t next = 0;

  at::Tensor wrap(at::Tensor local, bool is_view) {
    const size_t index = next++;
    auto spec = spec_of_result(plan, index, local);
    if (local.is_conj() || local.is_neg()) [[unlikely]] {  // which a DTensor has no bit for
      local = local.resolve_conj().resolve_neg();
    }
    // Some kernels keep their input's layout, such as channels last, which not every rule predicts.
    if (!is_view && !local.is_contiguous() && spec->meta().is_contiguous()) {
      local = local.contiguous();
    }
    if (plan.operand_strides_changed) [[unlikely]] {
      local = laid_out_as(std::move(local), spec->meta());
    }
    return is_view ? wrap_view(std::move(local), std::move(spec), index)
                   : wrap_local(std::move(local), std::move(spec));
  }

 private:
  at::Tensor wrap_view(at::Tensor local, SpecPtr spec, size_t index) const;
};

/// Makes DTensors of the op's results; a result that aliases a written argument is that argument itself.
void wrap_results(const CallSignature& call, const OpPlan& plan, torch::jit::Stack* stack);

}  // namespace tessera
