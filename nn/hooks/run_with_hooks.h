#pragma once
// Runs a function with a module's hooks: pre-hooks get its inputs, post-hooks its result.

#include <c10/util/SmallVector.h>

#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "nn/hooks/hook_point.h"
#include "nn/hooks/recomputable_call.h"
#include "nn/hooks/tensor_visitor.h"

namespace tessera {

namespace detail {

// How hooks hold an argument that forward takes as A. A const reference to tensors is copied (handles only), so that
// the caller's variable is unchanged. Others already belong to the call, or are the caller's on purpose.
template <class A>
struct InputSlot {
  using type = std::remove_reference_t<A>&;
};
template <class T>
struct InputSlot<const T&> {
  using type = std::conditional_t<holds_tensors<T>, T, const T&>;
};

using TensorRefBuffer = c10::SmallVector<at::Tensor*, 8>;

template <class... Ts>
TensorRefBuffer tensor_refs(Ts&... values) {
  TensorRefBuffer refs;
  (visit_tensors(values, [&](at::Tensor& tensor) { refs.push_back(&tensor); }), ...);
  return refs;
}

template <class... A, class Forward, class... Inputs>
std::unique_ptr<RecomputableCall> make_repeatable(const HookPoint& point, const Forward& forward,
                                                  const Inputs&... inputs) {
  if constexpr ((is_repeatable_argument<A> && ...)) {
    return std::make_unique<RepeatableFunction<Forward, A...>>(forward, inputs...);
  } else {
    TESSERA_CHECK(NotImplementedError, false,
                  "wrap_forward: the forward of {} cannot be repeated, as activation checkpointing does: it takes an "
                  "argument by pointer or view (ArrayRef, string_view), whose memory may be gone by then, or one that "
                  "cannot be copied. Let it take the value itself, or wrap the modules inside of it",
                  point.type_name());
    return nullptr;
  }
}

template <class R, class... A, class Forward, class... Inputs>
R forward_wrapped(HookedCall& call, const Forward& forward, Inputs&... inputs) {
  auto again = make_repeatable<A...>(call.point(), forward, inputs...);
  if constexpr (std::is_void_v<R>) {
    call.run_wrapped([&] { forward(static_cast<A&&>(inputs)...); }, std::move(again));
  } else {
    std::optional<R> result;
    call.run_wrapped([&] { result.emplace(forward(static_cast<A&&>(inputs)...)); }, std::move(again));
    return std::move(result).value();
  }
}

template <class R, class... A, class Forward>
R forward_with_inputs(HookedCall& call, Forward& forward, A&... args) {
  std::tuple<typename InputSlot<A>::type...> inputs(args...);
  return std::apply(
      [&](auto&... input) -> R {
        call.before(tensor_refs(input...));
        if (call.is_wrapped()) return forward_wrapped<R, A...>(call, forward, input...);
        return forward(static_cast<A&&>(input)...);
      },
      inputs);
}

}  // namespace detail

/// Runs `forward(args...)` with the hooks of `point`, for a layer's second entry point. A are the exact argument types:
/// run_with_hooks<R, const at::Tensor&>(point, forward, input).
template <class R, class... A, class Forward>
R run_with_hooks(HookPoint& point, Forward&& forward, A... args) {
  static_assert(!std::is_reference_v<R>, "tessera::Hooked: forward must return a value, so that hooks can replace it");
  HookedCall call(point);
  try {
    if constexpr (std::is_void_v<R>) {
      detail::forward_with_inputs<R, A...>(call, forward, args...);
      call.after({});
    } else {
      R result = detail::forward_with_inputs<R, A...>(call, forward, args...);
      call.after(detail::tensor_refs(result));
      return result;
    }
  } catch (...) {
    call.failed();
    throw;
  }
}

}  // namespace tessera
