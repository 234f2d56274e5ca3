#pragma once
// A function call that owns copies of its arguments, so that it can be repeated later. Activation checkpointing uses
// it.
//
// Copies do not extend to memory that an argument points to. So types that point elsewhere (raw pointers, ArrayRef,
// string_view), also as elements of a container, and types without a copy constructor do not compile; wrap_forward()
// throws NotImplementedError for them. A user-defined class may hide such a pointer: see shares_tensors().
// Thread safety: one thread at a time.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <functional>
#include <memory>
#include <optional>
#include <ranges>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "nn/hooks/tensor_visitor.h"

namespace tessera {

class RecomputableCall {
 public:
  virtual ~RecomputableCall() = default;
  /// Repeats the call with copies of the arguments, and drops the result.
  virtual void run() = 0;
  /// Visits the defined tensors among the arguments, always in the same order. `visit` may replace them.
  virtual void visit_inputs(const std::function<void(at::Tensor&)>& visit) = 0;
  /// Returns whether an argument points to a tensor of the caller, for example by a shared_ptr in a user-defined class.
  /// Replacing it in visit_inputs() would replace the caller's.
  virtual bool shares_tensors() = 0;
  /// Visits the defined random generators among the arguments.
  virtual void visit_generators(const std::function<void(const at::Generator&)>& visit) const = 0;
};

namespace detail {

template <class T, class... Outer>
constexpr bool keeps_what_is_inside();

/// True if a copy of T owns its values. `Outer` are the types that T is nested in; a repeated one, such as a tree's
/// node, adds nothing.
template <class T, class... Outer>
inline constexpr bool keeps_its_values = keeps_what_is_inside<T, Outer...>();
template <class T, class... Outer>
inline constexpr bool keeps_its_values<T*, Outer...> = false;
template <class... Outer>
inline constexpr bool keeps_its_values<std::string_view, Outer...> = false;
template <class T, class... Outer>
inline constexpr bool keeps_its_values<c10::ArrayRef<T>, Outer...> = false;
template <class T, size_t N, class... Outer>
inline constexpr bool keeps_its_values<std::span<T, N>, Outer...> = false;
template <class T, class... Outer>
inline constexpr bool keeps_its_values<std::reference_wrapper<T>, Outer...> = false;
template <class T, class... Outer>
inline constexpr bool keeps_its_values<std::optional<T>, Outer...> = keeps_its_values<std::remove_cv_t<T>, Outer...>;
template <class... T, class... Outer>
inline constexpr bool keeps_its_values<std::tuple<T...>, Outer...> =
    (keeps_its_values<std::remove_cvref_t<T>, Outer...> && ...);
template <class A, class B, class... Outer>
inline constexpr bool keeps_its_values<std::pair<A, B>, Outer...> = keeps_its_values<std::tuple<A, B>, Outer...>;
template <class... T, class... Outer>
inline constexpr bool keeps_its_values<std::variant<T...>, Outer...> = keeps_its_values<std::tuple<T...>, Outer...>;

/// Ranges whose elements are examined. One whose TensorVisitor declares that it has no tensors is a plain value.
template <class T>
concept LookedInto = ReferenceRange<T> &&(requires { TensorVisitor<T>::range; } || holds_tensors<T>);

/// Examines the elements of a container and the listed members of a class. Other types count as values.
template <class T, class... Outer>
constexpr bool keeps_what_is_inside() {
  if constexpr (!PlainValue<T> && !is_one_of<T, Outer...>) {
    if constexpr (HasTensorFields<T>) {
      return keeps_its_values<decltype(tensor_fields(std::declval<T&>())), T, Outer...>;
    } else if constexpr (LookedInto<T>) {
      return keeps_its_values<std::remove_cvref_t<std::ranges::range_reference_t<T>>, T, Outer...>;
    }
  }
  return true;
}

/// Types whose copies are known to have tensors of their own, which saves shares_tensors() the comparison.
template <class T>
inline constexpr bool owns_its_tensors = PlainValue<T> || std::is_same_v<T, at::Tensor>;
template <class T>
inline constexpr bool owns_its_tensors<std::optional<T>> = owns_its_tensors<T>;
template <class T>
inline constexpr bool owns_its_tensors<std::vector<T>> = owns_its_tensors<T>;

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

/// True if an argument of the type (by value or reference) can be kept for a later call.
template <class A>
inline constexpr bool is_repeatable_argument =
    std::is_copy_constructible_v<std::decay_t<A>>&& detail::keeps_its_values<std::decay_t<A>>;

/// RecomputableCall of `function`. `A` are the exact argument types of the call.
template <class Function, class... A>
class RepeatableFunction final : public RecomputableCall {
  static_assert(
      (is_repeatable_argument<A> && ...),
      "tessera::RecomputableCall: an argument cannot be kept: it is, or has in it, a pointer or a view of memory "
      "that may be gone by then, or cannot be copied. Pass the value itself (at::Tensor, std::vector of them)");

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

  bool shares_tensors() override {
    if constexpr ((detail::owns_its_tensors<std::remove_cvref_t<A>> && ...)) {
      return false;
    }
    std::unordered_set<const at::Tensor*> own;
    visit_inputs([&](at::Tensor& tensor) { own.insert(&tensor); });
    bool shares = false;
    auto copies = args_;
    const auto look = [&](at::Tensor& tensor) { shares = shares || own.contains(&tensor); };
    std::apply([&](auto&... arg) { (visit_tensors(arg, look), ...); }, copies);
    return shares;
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
