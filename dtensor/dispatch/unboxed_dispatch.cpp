// Unboxed kernels for ops on DTensors with the most common signatures, used if the plan is cached and only a call on
// the local tensors remains.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <tuple>
#include <type_traits>

#include "dtensor/dispatch/call_signature.h"
#include "dtensor/dispatch/dispatch.h"
#include "dtensor/dispatch/dispatch_checks.h"
#include "dtensor/dispatch/dispatch_scopes.h"
#include "dtensor/dispatch/local_arguments.h"
#include "dtensor/dispatch/plan_cache.h"
#include "dtensor/dispatch/result_wrapper.h"
#include "dtensor/propagation/propagate.h"

namespace tessera {

namespace {

/// Like the stack of a boxed call, but without reference counts of tensors, because the caller's outlive it.
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

const at::Tensor& next_local(const at::Tensor& /*tensor*/, const Locals& locals, size_t& next) {
  return locals[next++];
}
const at::Scalar& next_local(const at::Scalar& number, const Locals& /*locals*/, size_t& /*next*/) {
  return number;
}

/// Runs an op that writes nothing and returns one tensor. Calls that are not in the cache, or that need more than a
/// call of the op on local tensors, go to dispatch().
template <class... Args>
struct UnboxedDispatch {
  static constexpr size_t kTensors = (size_t{std::is_same_v<Args, const at::Tensor&>} + ...);

  c10::TypedOperatorHandle<at::Tensor(Args...)> op;

  at::Tensor operator()(Args... args) const {
    if (const auto& info = OpInfo::of(op); may_run(info)) {
      const DispatchingOp dispatching(op);
      auto& cache = PlanCache::of_thread();
      const PlanCache::Hold hold(cache);
      const BorrowedArguments<sizeof...(Args)> arguments(args...);
      const CallSignature call(info, arguments.values);
      if (const OpPlan* plan = may_run(call) ? cache.find(call) : nullptr;
          plan && !plan->nothing_to_compute && !plan->must_dry_run) {
        cache.count_hit();
        try {
          const Locals locals(call, *plan);
          size_t next = 0;
          const std::tuple<Args...> local{next_local(args, locals, next)...};  // in order, as braces are
          auto result = std::apply([&](Args... of) { return op.call(of...); }, local);
          return result.defined() ? ResultWrapper{call, *plan}.wrap(std::move(result), info.returns[0].is_view)
                                  : result;
        } catch (...) {
          rethrow_with_call(op, call);
        }
      }
    }
    torch::jit::Stack stack;
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
    return call.operands.size() == kTensors && !call.mixed && !call.has_materialized_view;
  }
};

template <class... Args>
torch::CppFunction unboxed(const c10::OperatorHandle& op) {
  return torch::CppFunction(UnboxedDispatch<Args...>{op.typed<at::Tensor(Args...)>()});
}

/// Returns "tts" for an op of (Tensor, Tensor, Scalar) that writes nothing and returns one tensor; otherwise "", or a
/// signature without an UnboxedDispatch.
std::string describe_signature(const c10::FunctionSchema& schema) {
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
  const auto signature = describe_signature(op.schema());
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

}  // namespace tessera
