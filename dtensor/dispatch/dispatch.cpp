#include "dtensor/dispatch/dispatch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/TensorOptions.h>

#include <algorithm>
#include <iterator>
#include <memory>

#include "base/error.h"
#include "dtensor/dispatch/autograd_zeros.h"
#include "dtensor/dispatch/call_signature.h"
#include "dtensor/dispatch/dispatch_checks.h"
#include "dtensor/dispatch/dispatch_scopes.h"
#include "dtensor/dispatch/functional_variant.h"
#include "dtensor/dispatch/implicit_replication.h"
#include "dtensor/dispatch/local_arguments.h"
#include "dtensor/dispatch/plan_cache.h"
#include "dtensor/dispatch/result_wrapper.h"
#include "dtensor/dispatch/write_back.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/propagation/propagate.h"

namespace tessera {

namespace {

using torch::jit::Stack;
using Arguments = c10::SmallVector<c10::IValue, 8>;

/// Throws if the kernel does not exist. Runs on every rank before anything moves, because ranks without elements would
/// not call it. The device is that of the data, which for offloaded shards differs from the mesh's.
void check_kernel_exists(const c10::OperatorHandle& op, c10::Device device) {
  const auto key = c10::computeDispatchKey(std::nullopt, std::nullopt, device);
  TESSERA_CHECK(NotImplementedError, device.is_meta() || op.hasComputedKernelForDispatchKey(key),
                "{}: libtorch has no kernel of it for {}; use another op, or operands on another device",
                c10::toString(op.operator_name()), c10::DeviceTypeName(device.type()));
}

std::unique_ptr<const OpPlan> make_plan(const c10::OperatorHandle& op, const CallSignature& call) {
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
      check_kernel_exists(op, dtensor->local.device());
    }
    rule_call.operands.push_back({.arg = operand.arg,
                                  .spec = dtensor ? dtensor->spec : SpecPtr(),
                                  .meta = dtensor ? dtensor->spec->meta() : TensorMeta::of(*operand.tensor),
                                  .written = call.is_written(operand.arg)});
  }
  return std::make_unique<const OpPlan>(propagate(rule, rule_call));
}

/// On ranks with empty shards, dry-runs the kernel so that bad arguments throw on every rank.
void ask_once(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan, const Locals& locals) {
  if (plan.rule->needs_dry_run) {
    dry_run_kernel(op, call, locals);
  } else {
    ask_as_first_rank(op, call, plan, locals);
  }
  plan.must_dry_run = false;
}

void run_local(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan, const Locals& locals,
               Stack* stack) {
  if (plan.nothing_to_compute && make_empty_results(op, call, plan, locals, stack)) {
    if (plan.rule->needs_dry_run) {
      dry_run_kernel(op, call, locals);
    }
    return;
  }
  // A rule's local call may use planned outputs.
  if (plan.rule->local_call && (!plan.outputs_from_results || plan.rule->requires_replicated)) {
    plan.rule->local_call(op, stack, plan);
  } else {
    op.callBoxed(stack);
  }
}

void write_back_operands(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan,
                         const Locals& locals) {
  for (size_t i = 0; i < call.operands.size(); ++i) {
    const auto& operand = call.operands[i];
    if (plan.redistribute[i] && call.is_written(operand.arg)) {
      write_back(op, operand, locals[i], plan.operands[i]);
    }
  }
}

/// Carries over the write to a materialized view; check_materialized_views() allowed at most one.
void carry_over_write(const CallSignature& call) {
  for (const auto& operand : call.operands) {
    const auto* meta = call.is_written(operand.arg) ? dtensor_meta(*operand.tensor) : nullptr;
    if (meta && meta->materialized_view) {
      auto view = c10::make_intrusive<DTensorMeta>(
          meta->local, meta->spec, meta->origin,
          meta->materialized_view.carry_over(*operand.tensor, call.info->counts_versions));
      operand.tensor->unsafeGetTensorImpl()->set_backend_meta(std::move(view));
      return;
    }
  }
}

/// Autograd counts writes of the DTensor. Its local tensor, which several DTensors may share (p.data()), has a separate
/// count, by which fully_shard detects whether a shard changed.
void count_writes(const CallSignature& call) {
  for (const auto& operand : call.operands) {
    if (!operand.dtensor || !call.is_written(operand.arg)) {
      continue;
    }
    count_write(dtensor_meta(*operand.tensor)->local);  // which write_back() may have replaced
    if (call.info->counts_versions) {
      count_write(*operand.tensor);
    }
  }
}

/// Runs the op on local tensors as `plan` says. The stack has placeholders for the arguments.
void run_plan(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan, Stack* stack) {
  const Locals locals(call, plan);
  if (plan.must_dry_run) {
    ask_once(op, call, plan, locals);
  }
  put_local_arguments(call, locals, stack);
  run_local(op, call, plan, locals, stack);
  if (plan.writes_back) {
    write_back_operands(op, call, plan, locals);
  }
  wrap_results(call, plan, stack);
  if (call.info->writes) {
    count_writes(call);
    if (call.has_materialized_view) {
      carry_over_write(call);
    }
  }
}

/// Handles a call with both DTensors and plain tensors: runs it if the plain ones are empty, or zeros made by autograd;
/// otherwise throws.
void run_mixed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, const CallSignature& call, Stack* stack) {
  if (has_empty_gradients(call) && may_replicate_implicitly(call)) {
    std::copy(call.args.begin(), call.args.end(), stack->end() - std::ssize(call.args));
    apply_implicit_replication(stack, call.args.size());
    dispatch(op, keys, stack);
  } else if (!add_zeros_of_autograd(op, call, stack)) {
    throw_mixed(op, call);
  }
}

}  // namespace

namespace {

void dispatch_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, const CallSignature& call, Stack* stack) {
  const auto& info = *call.info;
  if (call.mixed) {
    run_mixed(op, keys, call, stack);
    return;
  }
  if (call.has_materialized_view) {
    check_materialized_views(op, call);
  }
  if (!info.rule) {
    check_runs_whole(op, call);
  }
  auto& cache = PlanCache::of_thread();
  const PlanCache::Hold hold(cache);
  std::unique_ptr<const OpPlan> uncached;
  const auto& plan = cache.find_or_make(call, uncached, [&] { return make_plan(op, call); });
  if (ExplicitRedistribution::level() != ExplicitRedistribution::Level::Off) {
    check_moves_allowed(op, call, plan);
  }
  if (plan.writes_back) {
    check_written_once(op, call, plan);
  }
  run_plan(op, call, plan, stack);
}

}  // namespace

void dispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const DispatchingOp dispatching(op);
  const auto& info = OpInfo::of(op);
  if (info.functional) {
    run_functional_variant(op, *info.functional, stack);
    return;
  }
  // Moves the call's arguments off the stack: they keep the DTensors alive, and in-place ops return them.
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(info.kinds.size());
  const Arguments arguments(std::make_move_iterator(first), std::make_move_iterator(stack->end()));
  const CallSignature call(info, arguments);
  try {
    dispatch_call(op, keys, call, stack);
  } catch (...) {
    rethrow_with_call(op, call);
  }
}

DispatchStats dispatch_stats() {
  const auto& cache = PlanCache::of_thread();
  return {.cache_hits = cache.hits(), .cache_misses = cache.misses()};
}

}  // namespace tessera
