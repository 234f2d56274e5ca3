#pragma once
// Visits the tensors in a value. Hooks access the inputs and outputs of a module through it.
//
// Supported: at::Tensor; std::optional, pair, tuple, variant, array, vector and other ranges with assignable elements;
// values of maps and of torch::OrderedDict; pointers; and combinations of these. Numbers, enums, strings, devices,
// scalars and empty classes hold no tensors. Any other class is a compile error, so that no tensor is skipped silently.
// For a class of your own, list its members in a free function next to it:
//
//   struct Batch { at::Tensor tokens; std::optional<at::Tensor> mask; int64_t step; };
//   auto tensor_fields(Batch& batch) { return std::tie(batch.tokens, batch.mask); }
//   auto tensor_fields(Config&) { return std::tie(); }              // holds no tensors
//
// For a type in a namespace that is not yours:
//
//   template <> struct tessera::TensorVisitor<their::Config> : tessera::NoTensors {};
//   template <> struct tessera::TensorVisitor<their::Pair> {
//     template <class F> static void visit(their::Pair& pair, F&& fn) { tessera::visit_tensors(pair.first(), fn); }
//   };
//
// Pure functions; thread-safe for separate values.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Scalar.h>
#include <c10/core/SymInt.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/ArrayRef.h>
#include <torch/ordered_dict.h>

#include <optional>
#include <ranges>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

namespace tessera {

/// Base of a TensorVisitor for a type without tensors.
struct NoTensors {
  static constexpr bool holds_tensors = false;
  template <class T, class F>
  static void visit(T&, F&&) {}
};

/// Customization point: `visit(T&, fn)` calls `fn(at::Tensor&)`, which may assign, on every tensor.
template <class T>
struct TensorVisitor;

namespace detail {

template <class T, class... Known>
inline constexpr bool is_one_of = (std::is_same_v<T, Known> || ...);

template <class T>
concept PlainValue = std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_null_pointer_v<T> || std::is_empty_v<T> ||
    is_one_of<T, std::string, std::string_view, at::Device, at::Scalar, c10::SymInt, at::TensorOptions, at::Generator,
              std::vector<bool>>;

template <class T>
concept HasTensorFields = requires(T& value) {
  tensor_fields(value);
};

// Ranges with references to elements; assigning through a range of proxies would have no effect.
template <class T>
concept ReferenceRange = std::ranges::input_range<T> && std::is_lvalue_reference_v<std::ranges::range_reference_t<T>>;

template <class T>
constexpr bool visitor_holds_tensors() {
  if constexpr (requires { TensorVisitor<T>::holds_tensors; }) {
    return TensorVisitor<T>::holds_tensors;
  } else {
    static_cast<void>(sizeof(TensorVisitor<T>));  // does not compile for an unknown type
    return true;
  }
}

}  // namespace detail

/// True if a value of the type may hold a tensor. If false, visiting costs nothing at run time.
template <class T>
inline constexpr bool holds_tensors = detail::visitor_holds_tensors<std::remove_cv_t<T>>();

/// Calls `fn(at::Tensor&)` on every defined tensor in `value`, in the order of declaration.
template <class T, class F>
void visit_tensors(T& value, F&& fn) {
  if constexpr (holds_tensors<T>) {
    static_assert(!std::is_const_v<T>,
                  "tessera::visit_tensors: tensors behind a const pointer, reference or element cannot be replaced "
                  "by hooks; take the argument by value or by const reference of the whole type");
    TensorVisitor<T>::visit(value, fn);
  }
}

template <class T>
struct TensorVisitor {
  static constexpr bool by_fields = detail::HasTensorFields<T>;
  static constexpr bool plain = !by_fields && detail::PlainValue<T>;
  static constexpr bool range = !by_fields && !plain && detail::ReferenceRange<T>;
  static_assert(by_fields || plain || range,
                "tessera::TensorVisitor<T>: it is not known which tensors this type holds. Beside the type, write "
                "`auto tensor_fields(T& value) { return std::tie(value.a, value.b); }` (std::tie() for none), or "
                "specialise tessera::TensorVisitor<T>; see nn/hooks/tensor_visitor.h");

  static constexpr bool holds_any() {
    if constexpr (range) {
      return tessera::holds_tensors<std::remove_reference_t<std::ranges::range_reference_t<T>>>;
    } else if constexpr (by_fields) {
      return std::tuple_size_v<decltype(tensor_fields(std::declval<T&>()))> > 0;
    } else {
      return false;
    }
  }
  static constexpr bool holds_tensors = holds_any();

  template <class F>
  static void visit(T& value, F&& fn) {
    if constexpr (by_fields) {
      std::apply([&](auto&... field) { (visit_tensors(field, fn), ...); }, tensor_fields(value));
    } else if constexpr (range) {
      for (auto& element : value) visit_tensors(element, fn);
    }
  }
};

template <>
struct TensorVisitor<at::Tensor> {
  static constexpr bool holds_tensors = true;
  template <class F>
  static void visit(at::Tensor& tensor, F&& fn) {
    if (tensor.defined()) fn(tensor);
  }
};

template <class T>
struct TensorVisitor<std::optional<T>> {
  static constexpr bool holds_tensors = tessera::holds_tensors<T>;
  template <class F>
  static void visit(std::optional<T>& value, F&& fn) {
    if (value.has_value()) visit_tensors(*value, fn);
  }
};

/// Visits the pointee, if any. It belongs to the caller, which sees replacements.
template <class T>
struct TensorVisitor<T*> {
  static constexpr bool holds_any() {
    if constexpr (std::is_void_v<T> || std::is_function_v<T>) {
      return false;
    } else {
      return tessera::holds_tensors<T>;
    }
  }
  static constexpr bool holds_tensors = holds_any();
  template <class F>
  static void visit(T* value, F&& fn) {
    if (value != nullptr) visit_tensors(*value, fn);
  }
};

template <class A, class B>
struct TensorVisitor<std::pair<A, B>> {
  static constexpr bool holds_tensors = tessera::holds_tensors<A> || tessera::holds_tensors<B>;
  template <class F>
  static void visit(std::pair<A, B>& value, F&& fn) {
    visit_tensors(value.first, fn);
    visit_tensors(value.second, fn);
  }
};

template <class... Ts>
struct TensorVisitor<std::tuple<Ts...>> {
  static constexpr bool holds_tensors = (tessera::holds_tensors<std::remove_reference_t<Ts>> || ...);
  template <class F>
  static void visit(std::tuple<Ts...>& value, F&& fn) {
    std::apply([&](auto&... element) { (visit_tensors(element, fn), ...); }, value);
  }
};

template <class... Ts>
struct TensorVisitor<std::variant<Ts...>> {
  static constexpr bool holds_tensors = (tessera::holds_tensors<Ts> || ...);
  template <class F>
  static void visit(std::variant<Ts...>& value, F&& fn) {
    std::visit([&](auto& alternative) { visit_tensors(alternative, fn); }, value);
  }
};

template <class Key, class Value>
struct TensorVisitor<torch::OrderedDict<Key, Value>> {
  static constexpr bool holds_tensors = tessera::holds_tensors<Value>;
  template <class F>
  static void visit(torch::OrderedDict<Key, Value>& dict, F&& fn) {
    for (auto& item : dict) visit_tensors(item.value(), fn);
  }
};

template <class T>
struct TensorVisitor<c10::ArrayRef<T>> : NoTensors {
  static_assert(!tessera::holds_tensors<T>,
                "tessera::TensorVisitor: an ArrayRef of tensors is read-only, so hooks cannot replace them; let "
                "forward take std::vector<at::Tensor>");
};

}  // namespace tessera
