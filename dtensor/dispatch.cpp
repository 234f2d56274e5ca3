#include "dtensor/dispatch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <vector>

#include "base/error.h"
#include "dtensor/call_signature.h"
#include "dtensor/dispatch_checks.h"
#include "dtensor/dispatch_scopes.h"
#include "dtensor/dtensor_impl.h"
#include "dtensor/functional_form.h"
#include "dtensor/plan_cache.h"
#include "dtensor/propagate.h"
#include "dtensor/redistribute.h"
#include "dtensor/write_back.h"

namespace tessera {

namespace {

using torch::jit::Stack;
using Arguments = c10::SmallVector<c10::IValue, 8>;

// Meshes differ between ranks, and ranks may be threads: one cache a thread, so no locks.
thread_local PlanCache plan_cache;

std::shared_ptr<const OpPlan> make_plan(const c10::OperatorHandle& op, const CallSignature& call) {
  const auto& rule = call.info->rule ? *call.info->rule : whole_op_rule();
  const DeviceMesh* mesh = nullptr;
  OpCall rule_call{.op = op, .args = call.args, .operands = {}, .outputs = {}, .offsets = {}};
  for (const auto& operand : call.operands) {
    const auto* dtensor = operand.dtensor;
    if (dtensor) {
      mesh = mesh ? mesh : &dtensor->spec->mesh();
      if (dtensor->spec->mesh() != *mesh) {
        throw_different_meshes(op, call);
      }
    }
    rule_call.operands.push_back({.arg = operand.arg,
                                  .spec = dtensor ? dtensor->spec : SpecPtr(),
                                  .meta = dtensor ? dtensor->spec->meta() : TensorMeta::of(*operand.tensor),
                                  .written = call.info->is_written(operand.arg)});
  }
  return std::make_shared<const OpPlan>(propagate(rule, rule_call));
}

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
        moved_.push_back(
            redistribute_local(operand.dtensor->local, *operand.dtensor->spec, plan.operands[i]->placements()));
        tensors_.push_back(&moved_.back());
      }
    }
  }
  Locals(const Locals&) = delete;
  Locals& operator=(const Locals&) = delete;

  const at::Tensor& operator[](size_t i) const { return *tensors_[i]; }

 private:
  c10::SmallVector<const at::Tensor*, 8> tensors_;
  std::vector<at::Tensor> moved_;
};

/// The list that the op gets for argument `value`: operands i, i + 1, ... of it, of which i becomes the next one.
c10::IValue local_list(const c10::IValue& value, const CallSignature& call, const Locals& locals, size_t& i) {
  const size_t arg = call.operands[i].arg;
  if (value.isTensorList()) {
    std::vector<at::Tensor> list;
    for (; i < call.operands.size() && call.operands[i].arg == arg; ++i) {
      list.push_back(locals[i]);
    }
    return list;
  }
  auto list = value.toList().copy();  // Tensor?[]: undefined entries stay
  for (; i < call.operands.size() && call.operands[i].arg == arg; ++i) {
    list.set(call.operands[i].index, c10::IValue(locals[i]));
  }
  return list;
}

/// Fills the places of the call's arguments on the stack: this rank's local tensors where there were DTensors.
void put_local_arguments(const CallSignature& call, const Locals& locals, Stack* stack) {
  const size_t first = stack->size() - call.args.size();
  size_t i = 0;
  for (size_t arg = 0; arg < call.args.size(); ++arg) {
    auto& value = (*stack)[first + arg];
    if (i == call.operands.size() || call.operands[i].arg != arg) {
      value = call.args[arg];
    } else if (call.args[arg].isTensor()) {
      value = locals[i++];
    } else {
      value = local_list(call.args[arg], call, locals, i);
    }
  }
}

/// Empty results where this rank has no part of any output; a written operand then has nothing to write.
/// False if the results cannot be told from the plan: some are undefined.
bool make_empty_results(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan,
                        const Locals& locals, Stack* stack) {
  const auto& returns = op.schema().returns();
  const bool one_list = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType;
  if (!one_list && returns.size() != plan.outputs.size()) {
    return false;
  }
  // A plain number of the CPU may stand beside DTensors of a GPU.
  const auto like = std::find_if(call.operands.begin(), call.operands.end(), [](const auto& o) { return o.dtensor; });
  const auto options = locals[static_cast<size_t>(like - call.operands.begin())].options();
  std::vector<at::Tensor> results;
  for (const auto& spec : plan.outputs) {
    results.push_back(at::empty(spec->local_sizes(), options.dtype(spec->dtype())));
  }
  torch::jit::drop(*stack, op.schema().arguments().size());
  if (one_list) {
    stack->emplace_back(std::move(results));
  } else {
    stack->insert(stack->end(), results.begin(), results.end());
  }
  return true;
}

void run_local(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan, const Locals& locals,
               Stack* stack) {
  if (plan.nothing_here && make_empty_results(op, call, plan, locals, stack)) {
    return;
  }
  if (plan.rule->local_call) {
    plan.rule->local_call(op, stack, plan);
  } else {
    op.callBoxed(stack);
  }
}

void write_back(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan, const Locals& locals) {
  for (size_t i = 0; i < call.operands.size(); ++i) {
    const auto& operand = call.operands[i];
    if (plan.redistribute[i] && call.info->is_written(operand.arg)) {
      write_back(op, operand, locals[i], plan.operands[i]);
    }
  }
}

/// The spec of result number `next`; where the plan could not tell it, the result's own sizes on every rank.
SpecPtr spec_of_result(const OpPlan& plan, size_t next, const at::Tensor& result) {
  if (plan.outputs_from_results) {
    const auto planned = std::find_if(plan.operands.begin(), plan.operands.end(), [](const auto& p) { return p; });
    return DTensorSpec::make((*planned)->mesh(), Placements((*planned)->placements().size(), Replicate()),
                             TensorMeta::of(result));
  }
  TESSERA_ASSERT(next < plan.outputs.size(), "result {} of {} is not planned", next, plan.outputs.size());
  return plan.outputs[next];
}

/// Makes DTensors of an op's results. Views know where in the viewed tensor they begin, as autograd's own views do.
struct ResultWrapper {
  const CallSignature& call;
  const OpPlan& plan;
  size_t next = 0;

  at::Tensor wrap(at::Tensor local, bool is_view) {
    const size_t index = next++;
    auto spec = spec_of_result(plan, index, local);
    // Kernels of channels-last tensors, say, lay out their results alike, which not every rule foresees.
    if (!is_view && !local.is_contiguous() && spec->meta().is_contiguous()) {
      local = local.contiguous();
    }
    return is_view ? wrap_view(std::move(local), std::move(spec), index)
                   : wrap_local(std::move(local), std::move(spec));
  }

 private:
  at::Tensor wrap_view(at::Tensor local, SpecPtr spec, size_t index) const {
    const auto& operand = call.operands[0];
    const auto* viewed = operand.dtensor;
    // A view is an inference tensor where the viewed one is, whatever mode it was made in, as autograd asserts.
    std::optional<c10::InferenceMode> mode;
    if (operand.tensor->is_inference() != c10::InferenceMode::is_enabled()) {
      mode.emplace(operand.tensor->is_inference());
    }
    // A viewed tensor that was moved is a copy, and so are its views. So is a view that local strides do not allow.
    const bool copied = viewed && (plan.redistribute[0] || viewed->copied_view ||
                                   (local.numel() > 0 && !local.is_alias_of(viewed->local)));
    auto view = wrap_local(std::move(local), std::move(spec), viewed ? viewed->origin : nullptr,
                           copied ? CopiedView::of(*operand.tensor) : CopiedView());
    const int64_t begin = viewed && call.args[operand.arg].isTensor() ? operand.tensor->storage_offset() : 0;
    const int64_t offset = index < plan.offsets.size() ? plan.offsets[index] : 0;
    view.unsafeGetTensorImpl()->set_storage_offset(begin + offset);
    return view;
  }
};

/// Makes DTensors of the op's results; a result that aliases a written argument is that argument itself.
void wrap_results(const CallSignature& call, const OpPlan& plan, Stack* stack) {
  const auto& returns = call.info->returns;
  const size_t first = stack->size() - returns.size();
  ResultWrapper wrapper{call, plan};
  for (size_t i = 0; i < returns.size(); ++i) {
    auto& value = (*stack)[first + i];
    if (returns[i].written_arg >= 0) {
      value = call.args[static_cast<size_t>(returns[i].written_arg)];
      ++wrapper.next;
    } else if (value.isTensor()) {
      if (value.toTensor().defined()) {
        value = wrapper.wrap(std::move(value).toTensor(), returns[i].is_view);
      }
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) {
        tensor = wrapper.wrap(std::move(tensor), returns[i].is_view);
      }
      value = c10::IValue(std::move(tensors));
    }
  }
}

/// Autograd counts writes of the DTensor; its local tensor, which several DTensors may share (p.data()), counts
/// its own, so that fully_shard can tell whether a shard changed.
void bump_written_versions(const CallSignature& call) {
  for (const auto& operand : call.operands) {
    if (!operand.dtensor || !call.info->is_written(operand.arg)) {
      continue;
    }
    const auto* meta = dtensor_meta(*operand.tensor);  // which write_back() may have replaced
    if (!meta->local.is_inference()) {
      meta->local.unsafeGetTensorImpl()->bump_version();
    }
  }
}

}  // namespace

void dispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const DispatchingOp dispatching(op);
  const auto& info = OpInfo::of(op);
  if (info.functional) {
    run_functional_form(op, *info.functional, stack);
    return;
  }
  // The call's arguments leave the stack: they keep the DTensors alive, and are what in-place ops return.
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(info.kinds.size());
  const Arguments arguments(std::make_move_iterator(first), std::make_move_iterator(stack->end()));
  const CallSignature call(info, arguments);
  if (call.mixed && ImplicitReplication::active() && may_replicate_plain_tensors(call)) {
    std::copy(arguments.begin(), arguments.end(), first);
    replicate_plain_tensors(stack, arguments.size());
    dispatch(op, keys, stack);
    return;
  }
  if (call.mixed) {
    check_not_mixed(op, call);
  }
  if (call.has_copied_view) {
    check_copied_views(op, call);
  }
  if (!info.rule) {
    check_runs_whole(op, call);
  }
  const auto plan = plan_cache.find_or_make(call, [&] { return make_plan(op, call); });

  if (ExplicitRedistribution::level() != ExplicitRedistribution::Level::Off) {
    check_moves_allowed(op, call, *plan);
  }
  const Locals locals(call, *plan);
  put_local_arguments(call, locals, stack);
  run_local(op, call, *plan, locals, stack);
  if (plan->writes_back) {
    write_back(op, call, *plan, locals);
  }
  wrap_results(call, *plan, stack);
  if (info.writes) {
    bump_written_versions(call);
  }
}

DispatchStats dispatch_stats() {
  return {.cache_hits = plan_cache.hits(), .cache_misses = plan_cache.misses()};
}

}  // namespace tessera
