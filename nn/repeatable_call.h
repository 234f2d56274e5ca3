#pragma once
// A function call that keeps copies of its arguments, so that it can be made again after the caller's are gone.
// Activation checkpointing recomputes a forward from one.
//
// What an argument refers to is not copied: types that point to memory of somebody else (raw pointers, references
// wrapped in views such as ArrayRef and string_view) cannot be kept, and neither can types without a copy constructor.
//
// Thread safety: one thread at a time.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "nn/tensor_visitor.h"

namespace tessera {

class RepeatableCall {
 public:
  virtual ~RepeatableCall() = default;
  /// Makes the call with copies of the kept arguments, and drops its result.
  virtual void run() = 0;
  /// Shows the defined tensors among the kept arguments, always in the same order; `visit` may replace them.
  virtual void visit_inputs(const std::function<void(at::Tensor&)>& visit) = 0;
  /// Shows the defined random generators among the kept arguments.
  virtual void visit_generators(const std::function<void(const at::Generator&)>& visit) const = 0;
};

namespace detail {

template <class T>
inline constexpr bool keeps_its_values = !std::is_pointer_v<T> && !std::is_same_v<T, std::string_view>;
template <class T>
inline constexpr bool keeps_its_values<c10::ArrayRef<T>> = false;
template <class T, size_t N>
inline constexpr bool keeps_its_values<std::span<T, N>> = false;
template <class T>
inline constexpr bool keeps_its_values<std::reference_wrapper<T>> = false;
template <class T>
inline constexpr bool keeps_its_values<std::optional<T>> = keeps_its_values<T>;

template <class T>
at::Generator generator_in(const T& argument) {
  if constexpr (std::is_same_v<T, at::Generator>) {
    return argument;
  } else if constexpr (std::is_same_v<T, std::optional<at::Generator>>) {
    return argument.value_or(at::Generator());
  } else {
    return {};
  }
}

}  // namespace detail

/// Whether an argument of the type (by value or reference) can be kept for a later call.
template <class A>
inline constexpr bool is_repeatable_argument =
    std::is_copy_constructible_v<std::decay_t<A>>&& detail::keeps_its_values<std::decay_t<A>>;

/// `A` are the exact argument types of the call.
template <class Function, class... A>
class RepeatableFunction final : public RepeatableCall {
  static_assert((is_repeatable_argument<A> && ...),
                "tessera::RepeatableCall: an argument cannot be kept: it is a pointer or a view of memory that may be "
                "gone by then, or cannot be copied. Pass the value itself (at::Tensor, std::vector, std::shared_ptr)");

 public:
  explicit RepeatableFunction(Function function, const std::decay_t<A>&... args)
      : function_(std::move(function)), args_(args...) {}

  void run() override {
    auto args = args_;  // the call may change or move from its arguments
    std::apply([this](auto&... arg) { static_cast<void>(function_(static_cast<A&&>(arg)...)); }, args);
  }

  void visit_inputs(const std::function<void(at::Tensor&)>& visit) override {
    std::apply([&](auto&... arg) { (visit_tensors(arg, visit), ...); }, args_);
  }

  void visit_generators(const std::function<void(const at::Generator&)>& visit) const override {
    const auto show = [&](const at::Generator& generator) {
      if (generator.defined()) {
        visit(generator);
      }
    };
    std::apply([&](const auto&... arg) { (show(detail::generator_in(arg)), ...); }, args_);
  }

 private:
  Function function_;
  std::tuple<std::decay_t<A>...> args_;
};

}  // namespace tessera
