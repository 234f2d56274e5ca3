#include "dtensor/dispatch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/error.h"
#include "dtensor/call_signature.h"
#include "dtensor/dtensor_impl.h"
#include "dtensor/functional_form.h"
#include "dtensor/propagate.h"
#include "dtensor/redistribute.h"

namespace tessera {

namespace {

using torch::jit::Stack;
using Arguments = c10::SmallVector<c10::IValue, 8>;

// Meshes differ between ranks, and ranks may be threads: one cache a thread, so no locks.
thread_local PlanCache plan_cache;

std::string describe_arguments(const CallSignature& call) {
  std::string text;
  for (const auto& operand : call.operands) {
    text += text.empty() ? "" : ", ";
    text += operand.dtensor ? operand.dtensor->spec->to_string()
                            : "plain " + to_string(TensorMeta::of(*operand.tensor)) + " tensor";
  }
  return text;
}

/// DTensors do not mix with plain tensors: nothing says whether a plain one is a copy or a part.
void check_not_mixed(const c10::OperatorHandle& op, const CallSignature& call) {
  const std::string name = toString(op.operator_name());
  for (const auto& operand : call.operands) {
    if (operand.dtensor && operand.dtensor->origin) {
      const auto& origin = *operand.dtensor->origin;
      TESSERA_CHECK(
          StateError, false,
          "{}: parameter '{}' is sharded, but it meets plain tensors: {}. It is gathered by the hooks of {} only "
          "while that module's forward or backward runs. Call the module itself (not its parts or forward of a stock "
          "base class), declare its type with TESSERA_MODULE or wrap it with hooked(), or gather it by hand with "
          "fsdp(module).unshard(). If this is an optimizer step, run backward() first",
          name, origin.name, describe_arguments(call), origin.module);
    }
  }
  TESSERA_CHECK(ValueError, false,
                "{}: DTensors and plain tensors are mixed: {}. Make the plain ones DTensors with "
                "distribute_tensor(t, mesh, {{Replicate()}}) or from_local, or take to_local() / full_tensor() of the "
                "DTensors",
                name, describe_arguments(call));
}

/// A view that was moved is a copy: the tensor it should be a view of would not see the write.
void check_writes_reach(const c10::OperatorHandle& op, const CallSignature& call) {
  for (const auto& operand : call.operands) {
    TESSERA_CHECK(
        NotImplementedError, !operand.dtensor || !operand.dtensor->copied_view || !call.info->is_written(operand.arg),
        "{} writes to a view whose data had to be moved, so the viewed tensor would not see it: {}. clone() the "
        "view to write to it alone, or redistribute() the tensor before the view so that the view cuts no shard",
        toString(op.operator_name()), describe_arguments(call));
  }
}

const OpRule& rule_of(const c10::OperatorHandle& op, const CallSignature& call) {
  const auto* rule = call.info->rule;
  TESSERA_CHECK(
      NotImplementedError, rule != nullptr,
      "{} has no sharding rule, so it cannot run on {}. Take to_local() or full_tensor() of the DTensors, run "
      "it on those, and make the result a DTensor with from_local; or register_op_rule() for it",
      toString(op.operator_name()), describe_arguments(call));
  return *rule;
}

std::shared_ptr<const OpPlan> make_plan(const c10::OperatorHandle& op, const CallSignature& call) {
  const auto& rule = rule_of(op, call);
  const DeviceMesh* mesh = nullptr;
  OpCall rule_call{.op = op, .args = call.args, .operands = {}, .outputs = {}, .offsets = {}};
  for (const auto& operand : call.operands) {
    const auto* dtensor = operand.dtensor;
    if (dtensor) {
      mesh = mesh ? mesh : &dtensor->spec->mesh();
      TESSERA_CHECK(ValueError, dtensor->spec->mesh() == *mesh, "{}: operands lie on different meshes: {}",
                    toString(op.operator_name()), describe_arguments(call));
    }
    rule_call.operands.push_back({.arg = operand.arg,
                                  .spec = dtensor ? dtensor->spec : SpecPtr(),
                                  .meta = dtensor ? dtensor->spec->meta() : TensorMeta::of(*operand.tensor),
                                  .written = call.info->is_written(operand.arg)});
  }
  return std::make_shared<const OpPlan>(propagate(rule, rule_call));
}

at::Tensor local_operand(const CallOperand& operand, const OpPlan& plan, size_t index) {
  if (!operand.dtensor) {
    return *operand.tensor;
  }
  if (!plan.redistribute[index]) {
    return operand.dtensor->local;
  }
  return redistribute_local(operand.dtensor->local, *operand.dtensor->spec, plan.operands[index]->placements());
}

/// This rank's local tensors of a call's operands, in their order.
using Locals = c10::SmallVector<at::Tensor, 8>;

/// Puts this rank's local tensors where the DTensors were.
Locals replace_by_locals(const CallSignature& call, const OpPlan& plan, Stack* stack) {
  Locals locals;
  for (size_t i = 0; i < call.operands.size(); ++i) {
    locals.push_back(local_operand(call.operands[i], plan, i));
  }
  const size_t first = stack->size() - call.args.size();
  for (size_t i = 0; i < call.operands.size();) {
    const size_t arg = call.operands[i].arg;
    auto& value = (*stack)[first + arg];
    if (value.isTensor()) {
      value = locals[i++];
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (; i < call.operands.size() && call.operands[i].arg == arg; ++i) {
        list.push_back(locals[i]);
      }
      value = c10::IValue(std::move(list));
    } else {
      auto list = value.toList().copy();  // Tensor?[]: undefined entries stay
      for (; i < call.operands.size() && call.operands[i].arg == arg; ++i) {
        list.set(call.operands[i].index, c10::IValue(locals[i]));
      }
      value = c10::IValue(std::move(list));
    }
  }
  return locals;
}

/// Empty results where this rank has no part of any output; a written operand then has nothing to write.
/// False if the results cannot be told from the plan: some are undefined.
bool make_empty_results(const c10::OperatorHandle& op, const OpPlan& plan, const Locals& locals, Stack* stack) {
  const auto& returns = op.schema().returns();
  const bool one_list = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType;
  if (!one_list && returns.size() != plan.outputs.size()) {
    return false;
  }
  std::vector<at::Tensor> results;
  for (const auto& spec : plan.outputs) {
    results.push_back(at::empty(spec->local_sizes(), locals[0].options().dtype(spec->dtype())));
  }
  torch::jit::drop(*stack, op.schema().arguments().size());
  if (one_list) {
    stack->emplace_back(std::move(results));
  } else {
    stack->insert(stack->end(), results.begin(), results.end());
  }
  return true;
}

void run_local(const c10::OperatorHandle& op, const OpPlan& plan, const Locals& locals, Stack* stack) {
  if (plan.nothing_here && make_empty_results(op, plan, locals, stack)) {
    return;
  }
  if (plan.rule->local_call) {
    plan.rule->local_call(op, stack, plan);
  } else {
    op.callBoxed(stack);
  }
}

/// Carries what the op wrote into moved operands back to where they were.
void write_back(const CallSignature& call, const OpPlan& plan, const Locals& locals) {
  for (size_t i = 0; i < call.operands.size(); ++i) {
    const auto& operand = call.operands[i];
    if (plan.redistribute[i] && call.info->is_written(operand.arg)) {
      const auto& home = *operand.dtensor;
      home.local.copy_(redistribute_local(locals[i], *plan.operands[i], home.spec->placements()));
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
  const OpPlan& plan;
  int64_t viewed_offset = 0;
  std::shared_ptr<const ParameterOrigin> origin;
  bool copies_views;  // the viewed operand was moved, so its views are of a copy
  size_t next = 0;

  ResultWrapper(const CallSignature& call, const OpPlan& plan, const Arguments& arguments) : plan(plan) {
    const auto* viewed = call.operands[0].dtensor;
    const auto& first = arguments[call.operands[0].arg];
    viewed_offset = viewed && first.isTensor() ? first.toTensor().storage_offset() : 0;
    origin = viewed ? viewed->origin : nullptr;
    copies_views = viewed && (plan.redistribute[0] || viewed->copied_view);
  }

  at::Tensor wrap(at::Tensor local, bool is_view) {
    const size_t index = next++;
    auto spec = spec_of_result(plan, index, local);
    if (!is_view) {
      return wrap_local(std::move(local), std::move(spec));
    }
    auto view = wrap_local(std::move(local), std::move(spec), origin, copies_views);
    const int64_t offset = index < plan.offsets.size() ? plan.offsets[index] : 0;
    view.unsafeGetTensorImpl()->set_storage_offset(viewed_offset + offset);
    return view;
  }
};

/// Makes DTensors of the op's results; a result that aliases a written argument is that argument itself.
void wrap_results(const CallSignature& call, const OpPlan& plan, const Arguments& arguments, Stack* stack) {
  const auto& returns = call.info->returns;
  const size_t first = stack->size() - returns.size();
  ResultWrapper wrapper(call, plan, arguments);
  for (size_t i = 0; i < returns.size(); ++i) {
    auto& value = (*stack)[first + i];
    if (returns[i].written_arg >= 0) {
      value = arguments[static_cast<size_t>(returns[i].written_arg)];
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
    if (operand.dtensor && call.info->is_written(operand.arg) && !operand.dtensor->local.is_inference()) {
      operand.dtensor->local.unsafeGetTensorImpl()->bump_version();
    }
  }
}

}  // namespace

void dispatch(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  CallSignature call(op, *stack);
  if (call.mixed) {
    check_not_mixed(op, call);
  }
  if (call.info->writes) {
    check_writes_reach(op, call);
  }
  if (call.info->functional) {
    run_functional_form(op, *call.info->functional, stack);
    return;
  }
  const auto plan = plan_cache.find_or_make(call, [&] { return make_plan(op, call); });

  // Keeps the DTensors alive to which `call` refers, and gives in-place ops what they return.
  const Arguments arguments(call.args.begin(), call.args.end());
  const auto locals = replace_by_locals(call, *plan, stack);
  run_local(op, *plan, locals, stack);
  if (plan->writes_back) {
    write_back(call, *plan, locals);
  }
  wrap_results(call, *plan, arguments, stack);
  if (call.info->writes) {
    bump_written_versions(call);
  }
}

DispatchStats dispatch_stats() {
  return {.cache_hits = plan_cache.hits(), .cache_misses = plan_cache.misses()};
}

}  // namespace tessera
