#pragma once
// Policies that choose the modules below a wrapped one that become separate units:
//
//   module_wrap_policy<EncoderLayerImpl, DecoderLayerImpl>()        modules of these types
//   lambda_auto_wrap_policy([](torch::nn::Module& m) { ... })       modules for which it returns true
//   size_based_auto_wrap_policy(1'000'000)                          modules with enough parameters outside inner units
//   custom_policy([](torch::nn::Module& m) -> WrapChoice { ... })   with other options for some
//   auto_wrap_policy(callable)                                      (module, recurse, nonwrapped_numel) -> bool
//   always_wrap_policy()                                            every module
//
// Children come before parents. Hooked<Impl> and types derived from Impl match Impl.
// Thread safety: threads may share a policy if its function allows that. Source: torch/distributed/fsdp/wrap.py.

#include <torch/nn/module.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <unordered_set>
#include <vector>

namespace tessera {

struct FSDPOptions;

using ModulePredicate = std::function<bool(torch::nn::Module&)>;

template <class... Impls>
ModulePredicate module_classes() {
  return [](torch::nn::Module& module) { return ((dynamic_cast<Impls*>(&module) != nullptr) || ...); };
}

/// Answer of a custom policy: whether to wrap a module, and changes to its options.
struct WrapChoice {
  /// Accepts only bool, since a lambda without captures converts to one.
  template <std::same_as<bool> Bool>
  WrapChoice(Bool wrap) : wrap(wrap) {}  // NOLINT: reads as the answer that it is
  template <std::invocable<FSDPOptions&> Overrides>
  WrapChoice(Overrides overrides) : wrap(true), overrides(std::move(overrides)) {}  // NOLINT

  bool wrap;
  std::function<void(FSDPOptions&)> overrides = nullptr;
};

struct WrapTarget {
  torch::nn::Module* module;
  std::function<void(FSDPOptions&)> overrides = nullptr;
};

/// Modules, with all below them, and parameters that a policy must ignore.
struct WrapScope {
  std::unordered_set<const torch::nn::Module*> ignored_modules;
  std::unordered_set<const c10::TensorImpl*> ignored_params;
};

class WrapPolicy {
 public:
  using Select = std::function<std::vector<WrapTarget>(torch::nn::Module& root, const WrapScope& scope)>;

  WrapPolicy() = default;
  explicit WrapPolicy(Select select) : select_(std::move(select)) {}

  explicit operator bool() const { return select_ != nullptr; }
  std::vector<WrapTarget> select(torch::nn::Module& root, const WrapScope& scope) const { return select_(root, scope); }

 private:
  Select select_;
};

WrapPolicy lambda_auto_wrap_policy(ModulePredicate wraps);
template <class... Impls>
WrapPolicy module_wrap_policy() {
  return lambda_auto_wrap_policy(module_classes<Impls...>());
}
WrapPolicy always_wrap_policy();
WrapPolicy custom_policy(std::function<WrapChoice(torch::nn::Module&)> choose);

/// Returns whether to look below the module, if `recurse`; otherwise, whether to wrap it. `nonwrapped_numel` elements
/// are in no inner unit. Bind further arguments with a lambda.
using AutoWrapFunction = std::function<bool(torch::nn::Module& module, bool recurse, int64_t nonwrapped_numel)>;
WrapPolicy auto_wrap_policy(AutoWrapFunction function);

struct SizeBasedOptions {
  int64_t min_num_params = 100'000'000;            // elements
  ModulePredicate force_leaf_modules = nullptr;    // not looked into; default: multi-head attention
  ModulePredicate exclude_wrap_modules = nullptr;  // never wrapped; default: list and dict containers
};
WrapPolicy size_based_auto_wrap_policy(SizeBasedOptions options = {});

}  // namespace tessera
