#include "dtensor/dispatch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "dtensor/autograd_zeros.h"
#include "dtensor/call_signature.h"
#include "dtensor/dispatch_checks.h"
#include "dtensor/dispatch_scopes.h"
#include "dtensor/dtensor_impl.h"
#include "dtensor/functional_form.h"
#include "dtensor/local_arguments.h"
#include "dtensor/plan_cache.h"
#include "dtensor/propagate.h"
#include "dtensor/result_wrapper.h"
#include "dtensor/write_back.h"

namespace tessera {

namespace {

using torch::jit::Stack;
using Arguments = c10::SmallVector<c10::IValue, 8>;

// Meshes differ between ranks, and ranks may be threads: one cache a thread, so no locks.
thread_local PlanCache plan_cache;

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
    }
    rule_call.operands.push_back({.arg = operand.arg,
                                  .spec = dtensor ? dtensor->spec : SpecPtr(),
                                  .meta = dtensor ? dtensor->spec->meta() : TensorMeta::of(*operand.tensor),
                                  .written = call.is_written(operand.arg)});
  }
  return std::make_unique<const OpPlan>(propagate(rule, rule_call));
}

/// Throws what the kernel refuses on ranks that have elements. It is asked again after that, as those call it again.
void ask_once(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan, const Locals& locals) {
  if (plan.rule->asks_kernel) {
    ask_kernel(op, call, locals);
  } else {
    ask_as_first_rank(op, call, plan, locals);
  }
  plan.has_to_ask = false;
}

void run_local(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan, const Locals& locals,
               Stack* stack) {
  if (plan.nothing_here && make_empty_results(op, call, plan, locals, stack)) {
    if (plan.rule->asks_kernel) {
      ask_kernel(op, call, locals);
    }
    return;
  }
  // What a rule does locally may rest on planned outputs.
  if (plan.rule->local_call && (!plan.outputs_from_results || plan.rule->whole_only)) {
    plan.rule->local_call(op, stack, plan);
  } else {
    op.callBoxed(stack);
  }
}

void write_back(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan, const Locals& locals) {
  for (size_t i = 0; i < call.operands.size(); ++i) {
    const auto& operand = call.operands[i];
    if (plan.redistribute[i] && call.is_written(operand.arg)) {
      write_back(op, operand, locals[i], plan.operands[i]);
    }
  }
}

/// Autograd counts writes of the DTensor; its local tensor, which several DTensors may share (p.data()), counts
/// its own, so that fully_shard can tell whether a shard changed.
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

/// What a boxed call would have on its stack, but without counting references to tensors: the caller's outlive it.
template <size_t N>
struct BorrowedArguments {
  template <class... Args>
  explicit BorrowedArguments(const Args&... args) : BorrowedArguments() {
    size_t i = 0;
    ((values[i++] = borrow(args)), ...);  // a throw in between reaches the destructor, as this object is constructed
  }
  BorrowedArguments(const BorrowedArguments&) = delete;
  BorrowedArguments& operator=(const BorrowedArguments&) = delete;
  ~BorrowedArguments() {
    for (auto& value : values) {
      if (value.isTensor()) {
        c10::MaybeOwnedTraits<c10::IValue>::destroyBorrow(value);
      }
    }
  }

  std::array<c10::IValue, N> values;

 private:
  BorrowedArguments() = default;

  static c10::IValue borrow(const at::Tensor& tensor) {
    return c10::IValue(c10::MaybeOwnedTraits<at::Tensor>::createBorrow(tensor));
  }
  static c10::IValue borrow(const at::Scalar& number) { return {number}; }
};

const at::Tensor& local_of(const at::Tensor& /*tensor*/, const Locals& locals, size_t& next) {
  return locals[next++];
}
const at::Scalar& local_of(const at::Scalar& number, const Locals& /*locals*/, size_t& /*next*/) {
  return number;
}

/// Runs an op that writes nothing and returns one tensor. What is not in the cache, or needs more than a call of the
/// op on the local tensors, goes to dispatch().
template <class... Args>
struct UnboxedDispatch {
  static constexpr size_t kTensors = (size_t{std::is_same_v<Args, const at::Tensor&>} + ...);

  c10::TypedOperatorHandle<at::Tensor(Args...)> op;

  at::Tensor operator()(Args... args) const {
    if (const auto& info = OpInfo::of(op); may_run(info)) {
      const DispatchingOp dispatching(op);
      const PlanCache::Hold hold(plan_cache);
      const BorrowedArguments<sizeof...(Args)> arguments(args...);
      const CallSignature call(info, arguments.values);
      if (const OpPlan* plan = may_run(call) ? plan_cache.find(call) : nullptr;
          plan && !plan->nothing_here && !plan->has_to_ask) {
        plan_cache.count_hit();
        const Locals locals(call, *plan);
        size_t next = 0;
        const std::tuple<Args...> local{local_of(args, locals, next)...};  // in order, as braces are
        auto result = std::apply([&](Args... of) { return op.call(of...); }, local);
        return result.defined() ? ResultWrapper{call, *plan}.wrap(std::move(result), info.returns[0].is_view) : result;
      }
    }
    Stack stack;
    stack.reserve(sizeof...(Args));
    (stack.emplace_back(args), ...);
    dispatch(op, {}, &stack);
    return std::move(stack.back()).toTensor();
  }

 private:
  static bool may_run(const OpInfo& info) {
    return info.rule && !info.rule->local_call && !info.writes &&
           ExplicitRedistribution::level() == ExplicitRedistribution::Level::Off;
  }
  static bool may_run(const CallSignature& call) {
    return call.operands.size() == kTensors && !call.mixed && !call.has_copied_view;
  }
};

template <class... Args>
torch::CppFunction unboxed(const c10::OperatorHandle& op) {
  return torch::CppFunction(UnboxedDispatch<Args...>{op.typed<at::Tensor(Args...)>()});
}

/// "tts" for an op of (Tensor, Tensor, Scalar) that writes nothing and returns one tensor; else "", or what no
/// UnboxedDispatch is for.
std::string signature_of(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  if (returns.size() != 1 || returns[0].real_type()->kind() != c10::TypeKind::TensorType) {
    return "";
  }
  std::string signature;
  for (const auto& argument : schema.arguments()) {
    const auto kind = argument.real_type()->kind();
    const char letter = kind == c10::TypeKind::TensorType ? 't' : kind == c10::TypeKind::NumberType ? 's' : '?';
    signature += is_written(argument) ? 'w' : letter;
  }
  return signature;
}

}  // namespace

torch::CppFunction dispatch_kernel(const c10::OperatorHandle& op) {
  using T = const at::Tensor&;
  using S = const at::Scalar&;
  const auto signature = signature_of(op.schema());
  if (signature == "t") {
    return unboxed<T>(op);
  }
  if (signature == "ts") {
    return unboxed<T, S>(op);
  }
  if (signature == "tt") {
    return unboxed<T, T>(op);
  }
  if (signature == "tts") {
    return unboxed<T, T, S>(op);
  }
  return torch::CppFunction::makeFromBoxedFunction<&dispatch>();
}

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
  if (call.mixed && (ImplicitReplication::active() || has_empty_gradients(call)) && may_replicate_plain_tensors(call)) {
    std::copy(arguments.begin(), arguments.end(), first);
    replicate_plain_tensors(stack, arguments.size());
    dispatch(op, keys, stack);
    return;
  }
  if (call.mixed) {
    if (add_zeros_of_autograd(op, call, stack)) {
      return;
    }
    check_not_mixed(op, call);
  }
  if (call.has_copied_view) {
    check_copied_views(op, call);
  }
  if (!info.rule) {
    check_runs_whole(op, call);
  }
  const PlanCache::Hold hold(plan_cache);
  std::unique_ptr<const OpPlan> uncached;
  const auto& plan = plan_cache.find_or_make(call, uncached, [&] { return make_plan(op, call); });

  if (ExplicitRedistribution::level() != ExplicitRedistribution::Level::Off) {
    check_moves_allowed(op, call, plan);
  }
  if (plan.writes_back) {
    check_written_once(op, call, plan);
  }
  const Locals locals(call, plan);
  if (plan.has_to_ask) {
    ask_once(op, call, plan, locals);
  }
  put_local_arguments(call, locals, stack);
  run_local(op, call, plan, locals, stack);
  if (plan.writes_back) {
    write_back(op, call, plan, locals);
  }
  wrap_results(call, plan, stack);
  if (info.writes) {
    count_writes(call);
  }
}

DispatchStats dispatch_stats() {
  return {.cache_hits = plan_cache.hits(), .cache_misses = plan_cache.misses()};
}

}  // namespace tessera
