#pragma once
// Hooked<Impl>: a module type with a hook point. libtorch's own modules call forward statically, without hooks.
//
//   struct BlockImpl : torch::nn::Module {
//     BlockImpl(int64_t dim) { fc = register_module("fc", tessera::nn::Linear(dim, dim)); }
//     at::Tensor forward(at::Tensor x) { return x + fc(x); }
//     tessera::nn::Linear fc{nullptr};
//   };
//   TESSERA_MODULE(Block);                       // instead of TORCH_MODULE(Block); BlockImpl must be complete
//
//   Block block(64);
//   hook_point(*block, "example").register_forward_hook(...);
//   block(x);                                    // runs the hooks
//
// A holder that TESSERA_MODULE declares works like a torch::nn::ModuleHolder. `holder(x)` and `holder->call(x)` accept
// forward's default arguments, which hooks do not see. `holder->forward(...)` has the exact argument types of
// Impl::forward and no defaults.
//
// Hooks get copies of the tensor handles that forward takes by value or by const reference, so the caller does not see
// replacements. It does for arguments by pointer or non-const reference.
//
// The static type decides: a call through torch::nn::LinearImpl& runs no hooks of a tessera::nn::Linear. A member of
// type torch::nn::Linear cannot hold a tessera::nn::Linear, so hook a stock parent as a whole: hooked(parent).

#include <c10/util/Type.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "nn/hooks/clone.h"
#include "nn/hooks/forward_signature.h"
#include "nn/hooks/hook_point.h"
#include "nn/hooks/linear_adapter.h"
#include "nn/hooks/python_forward.h"
#include "nn/hooks/run_with_hooks.h"

namespace tessera {

namespace detail {

struct FromImpl {};

// Everything of Hooked except forward, whose exact signature AnyModule must find in the most derived class.
template <class Impl, class Derived>
class HookedModule : public Impl, public HookPoint {
 public:
  using Impl::Impl;
  HookedModule() = default;
  HookedModule(FromImpl, const Impl& impl) : Impl(impl) {}

  torch::nn::Module& module() noexcept override { return *this; }
  std::string type_name() const override { return c10::demangle(typeid(Impl).name()); }
  /// Returns Impl's name. Through a torch::nn::Module&, libtorch returns the full name of Hooked<...>.
  const std::string& name() const {
    static const std::string name = c10::demangle(typeid(Impl).name());
    return name;
  }

  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override {
    if constexpr (can_clone) {
      return clone_checked(*this, [&]() -> std::shared_ptr<torch::nn::Module> {
        const auto copy = Impl::clone(device);
        TESSERA_CHECK(NotImplementedError, typeid(*copy) == typeid(Impl),
                      "clone: {}::clone returned a {}; derive the type from torch::nn::Cloneable<its own type>",
                      type_name(), c10::demangle(typeid(*copy).name()));
        return std::make_shared<Derived>(FromImpl(), static_cast<const Impl&>(*copy));
      });
    } else {
      check_cloneable();
      return nullptr;
    }
  }

  /// Runs the second entry point of recurrent layers (nn/recurrent.h) with the same hooks as forward.
  template <class Packed, class... Rest>
  requires requires(Impl& impl, const Packed& packed, Rest&&... rest) {
    impl.forward_with_packed_input(packed, std::forward<Rest>(rest)...);
  }
  auto forward_with_packed_input(const Packed& packed, Rest&&... rest) {
    const auto run = [this](const Packed& input, std::decay_t<Rest>... inputs) {
      return Impl::forward_with_packed_input(input, std::move(inputs)...);
    };
    using R = decltype(run(packed, std::forward<Rest>(rest)...));
    return run_with_hooks<R, const Packed&, std::decay_t<Rest>...>(*this, run, packed, std::forward<Rest>(rest)...);
  }

  void check_cloneable() const override {
    HookPoint::check_cloneable();
    TESSERA_CHECK(NotImplementedError, can_clone,
                  "clone: {} has no clone; derive it from torch::nn::Cloneable<{}> with a copy constructor, and build "
                  "its parameters and children in reset()",
                  type_name(), type_name());
    TESSERA_CHECK(NotImplementedError, typeid(*this) == typeid(Derived),
                  "clone: {} derives from a Hooked type and would be sliced; hook the most derived type",
                  c10::demangle(typeid(*this).name()));
    for (const auto& item : this->parameters_) {
      const at::Tensor* const member = const_cast<HookedModule*>(this)->parameter_member(item.key());
      TESSERA_CHECK(NotImplementedError, member == nullptr || member->is_same(item.value()),
                    "clone: the member {0} of {1} is not its registered parameter {0}, so the copy would lose it; tie "
                    "with tessera::tie_parameter in place of an assignment to the member",
                    item.key(), type_name());
    }
  }

  bool rebind_parameter(std::string_view name, const at::Tensor& tensor) override {
    at::Tensor* const member = parameter_member(name);
    at::Tensor* const entry = this->parameters_.find(std::string(name));
    if (member == nullptr || entry == nullptr) return false;
    *member = tensor;
    *entry = tensor;
    return true;
  }

  void pretty_print(std::ostream& stream) const override {
    using Inherited = void (torch::nn::Module::*)(std::ostream&) const;
    if constexpr (std::is_same_v<decltype(&Impl::pretty_print), Inherited>) {
      stream << name();
    } else {
      Impl::pretty_print(stream);
    }
  }

 protected:
  /// Runs Impl's forward, or Python's if libtorch's differs (nn/hooks/python_forward.h).
  template <class... Args>
  decltype(auto) call_impl(Args&&... args) {
    if constexpr (has_linear_forward<Impl>) {
      const auto adapter = HookPoint::find<LinearAdapter>();
      return python_forward(static_cast<Impl&>(*this), std::forward<Args>(args)..., adapter.get());
    } else if constexpr (has_python_forward<Impl>) {
      return python_forward(static_cast<Impl&>(*this), std::forward<Args>(args)...);
    } else {
      return Impl::forward(std::forward<Args>(args)...);
    }
  }
  template <class... Args>
  decltype(auto) call_impl(Args&&... args) const {
    return Impl::forward(std::forward<Args>(args)...);
  }

 private:
  using ModuleClone = std::shared_ptr<torch::nn::Module> (torch::nn::Module::*)(const std::optional<at::Device>&) const;
  static constexpr bool can_clone =
      std::is_copy_constructible_v<Impl> && !std::is_same_v<decltype(&Impl::clone), ModuleClone>;

  at::Tensor* parameter_member(std::string_view name) {
    Impl& impl = *this;
    if constexpr (requires {
                    { impl.parameter_member(name) } -> std::same_as<at::Tensor*>;
                  }) {
      return impl.parameter_member(name);
    }
    if constexpr (requires {
                    { impl.weight } -> std::same_as<at::Tensor&>;
                  }) {
      if (name == "weight") return &impl.weight;
    }
    if constexpr (requires {
                    { impl.bias } -> std::same_as<at::Tensor&>;
                  }) {
      if (name == "bias") return &impl.bias;
    }
    return nullptr;
  }
};

}  // namespace detail

/// Impl with a hook point: constructed, called and used like Impl. `Signature` is needed only if Impl::forward is
/// overloaded or a template.
template <class Impl, class Signature = detail::forward_signature_t<Impl>>
class Hooked;

template <class Impl, class R, class... A>
class Hooked<Impl, R(A...)> : public detail::HookedModule<Impl, Hooked<Impl, R(A...)>> {
 public:
  using detail::HookedModule<Impl, Hooked>::HookedModule;

  R forward(A... args) {
    if (!this->has_hooks()) [[likely]]
      return this->call_impl(std::forward<A>(args)...);
    const auto run = [this](A... inputs) -> R { return this->call_impl(std::forward<A>(inputs)...); };
    return run_with_hooks<R, A...>(*this, run, std::forward<A>(args)...);
  }

  /// Runs forward with Impl's default arguments.
  template <class... Args>
  requires(sizeof...(Args) <= sizeof...(A)) R call(Args&&... args) {
    if constexpr (sizeof...(Args) == sizeof...(A)) {
      return forward(std::forward<Args>(args)...);
    } else {
      return call_prefix(std::index_sequence_for<Args...>(), std::forward<Args>(args)...);
    }
  }

 private:
  template <size_t I>
  using Argument = std::tuple_element_t<I, std::tuple<A...>>;

  template <size_t... I>
  R call_prefix(std::index_sequence<I...>, Argument<I>... args) {
    if (!this->has_hooks()) [[likely]]
      return this->call_impl(std::forward<Argument<I>>(args)...);
    const auto run = [this](Argument<I>... inputs) -> R {
      return this->call_impl(std::forward<Argument<I>>(inputs)...);
    };
    return run_with_hooks<R, Argument<I>...>(*this, run, std::forward<Argument<I>>(args)...);
  }
};

template <class Impl, class R, class... A>
class Hooked<Impl, R(A...) const> : public detail::HookedModule<Impl, Hooked<Impl, R(A...) const>> {
 public:
  using detail::HookedModule<Impl, Hooked>::HookedModule;

  R forward(A... args) const {
    if (!this->has_hooks()) [[likely]]
      return this->call_impl(std::forward<A>(args)...);
    const auto run = [this](A... inputs) -> R { return this->call_impl(std::forward<A>(inputs)...); };
    return run_with_hooks<R, A...>(const_cast<Hooked&>(*this), run, std::forward<A>(args)...);
  }

  /// Runs forward with Impl's default arguments.
  template <class... Args>
  requires(sizeof...(Args) <= sizeof...(A)) R call(Args&&... args)
  const {
    if constexpr (sizeof...(Args) == sizeof...(A)) {
      return forward(std::forward<Args>(args)...);
    } else {
      return call_prefix(std::index_sequence_for<Args...>(), std::forward<Args>(args)...);
    }
  }

 private:
  template <size_t I>
  using Argument = std::tuple_element_t<I, std::tuple<A...>>;

  template <size_t... I>
  R call_prefix(std::index_sequence<I...>, Argument<I>... args) const {
    if (!this->has_hooks()) [[likely]]
      return this->call_impl(std::forward<Argument<I>>(args)...);
    const auto run = [this](Argument<I>... inputs) -> R {
      return this->call_impl(std::forward<Argument<I>>(inputs)...);
    };
    return run_with_hooks<R, Argument<I>...>(const_cast<Hooked&>(*this), run, std::forward<Argument<I>>(args)...);
  }
};

/// ModuleHolder whose `holder(args...)` runs hooks and accepts forward's default arguments.
template <class HookedType>
class HookedHolder : public torch::nn::ModuleHolder<HookedType> {
 public:
  using torch::nn::ModuleHolder<HookedType>::ModuleHolder;

  template <class... Args>
  auto operator()(Args&&... args) {
    return this->get()->call(std::forward<Args>(args)...);
  }
};

/// Returns a hooked module that shares parameters, buffers and children with a stock one, so optimizers stay valid.
/// Other members (options, training mode) are copied. Use the result in place of `stock`.
///   auto linear = tessera::hooked(stock_linear);          // torch::nn::Linear -> holder of a hooked one
/// Throws ValueError if empty, and StateError if `stock` has a hook point or is of a derived type.
template <class Impl>
HookedHolder<Hooked<Impl>> hooked(const std::shared_ptr<Impl>& stock) {
  static_assert(std::is_copy_constructible_v<Impl>, "tessera::hooked: the module's type must be copyable");
  static_assert(!std::is_base_of_v<HookPoint, Impl>, "tessera::hooked: the module has a hook point already");
  TESSERA_CHECK(ValueError, stock != nullptr, "hooked: the module is null");
  TESSERA_CHECK(StateError, typeid(*stock) == typeid(Impl),
                "hooked: the module is a {}, but was given as a {}, and would be sliced; {}",
                c10::demangle(typeid(*stock).name()), c10::demangle(typeid(Impl).name()),
                find_hook_point(*stock) != nullptr ? "it has a hook point already" : "give it as its own type");
  return HookedHolder<Hooked<Impl>>(std::make_shared<Hooked<Impl>>(detail::FromImpl(), *stock));
}

template <class Impl>
HookedHolder<Hooked<Impl>> hooked(const torch::nn::ModuleHolder<Impl>& stock) {
  TESSERA_CHECK(ValueError, !stock.is_empty(), "hooked: the module is null");
  return hooked(stock.ptr());
}

}  // namespace tessera

// Converts from its base, like libtorch's holders.
#define TESSERA_DETAIL_MODULE(Name, ...)                                                              \
  class Name : public ::tessera::HookedHolder<__VA_ARGS__> { /* NOLINT */                             \
   public:                                                                                            \
    using ::tessera::HookedHolder<__VA_ARGS__>::HookedHolder;                                         \
    Name() = default;                                                                                 \
    Name(::tessera::HookedHolder<__VA_ARGS__> other) : HookedHolder(std::move(other)) {} /* NOLINT */ \
    using Impl [[maybe_unused]] = __VA_ARGS__;                                                        \
  }

/// Declares the holder `Name` of a hooked NameImpl, like TORCH_MODULE.
#define TESSERA_MODULE(Name) TESSERA_DETAIL_MODULE(Name, ::tessera::Hooked<Name##Impl>)

/// Declares the holder `Name` of a hooked `ImplType`, like TORCH_MODULE_IMPL.
#define TESSERA_MODULE_IMPL(Name, ImplType) TESSERA_DETAIL_MODULE(Name, ::tessera::Hooked<ImplType>)

/// For a forward that is overloaded or a template: TESSERA_MODULE_SIGNATURE(Name, at::Tensor(at::Tensor)).
#define TESSERA_MODULE_SIGNATURE(Name, ...) TESSERA_DETAIL_MODULE(Name, ::tessera::Hooked<Name##Impl, __VA_ARGS__>)
