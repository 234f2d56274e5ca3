#include "dtensor/dispatch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>

#include "base/error.h"
#include "dtensor/call_signature.h"
#include "dtensor/dtensor_impl.h"
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
  OpCall rule_call{.op = op, .args = call.args, .operands = {}, .outputs = {}};
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

/// Puts this rank's local tensors where the DTensors were.
void replace_by_locals(const CallSignature& call, const OpPlan& plan, Stack* stack) {
  const size_t first = stack->size() - call.args.size();
  for (size_t i = 0; i < call.operands.size();) {
    const size_t arg = call.operands[i].arg;
    auto& value = (*stack)[first + arg];
    if (value.isTensor()) {
      value = local_operand(call.operands[i], plan, i);
      ++i;
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> locals;
      for (; i < call.operands.size() && call.operands[i].arg == arg; ++i) {
        locals.push_back(local_operand(call.operands[i], plan, i));
      }
      value = c10::IValue(std::move(locals));
    } else {
      auto list = value.toList().copy();
      for (size_t k = 0; k < list.size(); ++k) {
        const c10::IValue entry = list.get(k);
        if (entry.isTensor() && entry.toTensor().defined()) {
          list.set(k, c10::IValue(local_operand(call.operands[i], plan, i)));
          ++i;
        }
      }
      value = c10::IValue(std::move(list));
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

/// Makes DTensors of an op's results.
struct ResultWrapper {
  const OpPlan& plan;
  std::shared_ptr<const ParameterOrigin> origin;
  bool copies_views;  // the viewed operand was moved, so its views are of a copy
  size_t next = 0;

  ResultWrapper(const CallSignature& call, const OpPlan& plan) : plan(plan) {
    const auto* viewed = call.operands[0].dtensor;
    origin = viewed ? viewed->origin : nullptr;
    copies_views = viewed && (plan.redistribute[0] || viewed->copied_view);
  }

  at::Tensor wrap(at::Tensor local, bool is_view) {
    auto spec = spec_of_result(plan, next++, local);
    return wrap_local(std::move(local), std::move(spec), is_view ? origin : nullptr, is_view && copies_views);
  }
};

/// Makes DTensors of the op's results; a result that aliases a written argument is that argument itself.
void wrap_results(const CallSignature& call, const OpPlan& plan, const Arguments& arguments, Stack* stack) {
  const auto& returns = call.info->returns;
  const size_t first = stack->size() - returns.size();
  ResultWrapper wrapper(call, plan);
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

void dispatch(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  CallSignature call(op, *stack);
  if (call.mixed) {
    check_not_mixed(op, call);
  }
  if (call.info->writes) {
    check_writes_reach(op, call);
  }
  const auto plan = plan_cache.find_or_make(call, [&] { return make_plan(op, call); });

  // Keeps the DTensors alive to which `call` refers, and gives in-place ops what they return.
  const Arguments arguments(call.args.begin(), call.args.end());
  replace_by_locals(call, *plan, stack);
  if (plan->rule->local_call) {
    plan->rule->local_call(op, stack, *plan);
  } else {
    op.callBoxed(stack);
  }
  wrap_results(call, *plan, arguments, stack);
  if (call.info->writes) {
    bump_written_versions(call);
  }
}

at::Tensor replicated_local(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  return redistribute_local(meta->local, *meta->spec, Placements(meta->spec->placements().size(), Replicate()));
}

/// item(): the reduced value, the same on every rank.
at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  return replicated_local(tensor).item();
}

bool equal(const at::Tensor& a, const at::Tensor& b) {
  TESSERA_CHECK(ValueError, dtensor_meta(a) && dtensor_meta(b),
                "aten::equal: one of the tensors is a plain tensor; compare full_tensor() of the other one");
  return replicated_local(a).equal(replicated_local(b));
}

// set_data may turn a tensor from plain to DTensor and back: fully_shard's parameters keep their identity.
bool has_compatible_shallow_copy_type(const at::Tensor& /*self*/, const at::Tensor& /*from*/) {
  return true;
}

bool takes_tensors(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    if (argument.type()->str().find("Tensor") != std::string::npos) {
      return true;
    }
  }
  return false;
}

/// Ops with a CompositeExplicit kernel would run it on the DTensor as if it were a plain tensor.
void override_composite_explicit_ops(torch::Library& library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (name.name.rfind("aten::", 0) != 0 || !op ||
        !(op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
          op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional)) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) || !takes_tensors(op->schema())) {
      continue;
    }
    const std::string short_name = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(short_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&dispatch>());
  }
}

}  // namespace

DispatchStats dispatch_stats() {
  return {.cache_hits = plan_cache.hits(), .cache_misses = plan_cache.misses()};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&dispatch>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("equal", &equal);
  override_composite_explicit_ops(library);
}

}  // namespace tessera
