#pragma once
// Which modules of a model become units of their own. A policy is given to FullyShardedDataParallel, which asks it for
// the modules below the one that it wraps:
//
//   module_wrap_policy<EncoderLayerImpl, DecoderLayerImpl>()            every module of these types
//   lambda_auto_wrap_policy([](torch::nn::Module& m) { ... })           every module for which it says true
//   size_based_auto_wrap_policy(1'000'000)                              enough parameters that no unit below has
//   custom_policy([](torch::nn::Module& m) -> WrapChoice { ... })       with other options for some
//   auto_wrap_policy(callable)                                          (module, recurse, nonwrapped_numel) -> bool
//   always_wrap_policy()                                                every module
//
// Children come before their parents, and the module that was asked about is not in the list. Types are asked by
// dynamic_cast, so a Hooked<Impl> and a type derived from Impl count as Impl.
//
// Thread safety: a policy may be used by several threads if its function may.
// After torch/distributed/fsdp/wrap.py.

#include <torch/nn/module.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <unordered_set>
#include <vector>

namespace tessera {

struct FSDPOptions;

using ModulePredicate = std::function<bool(torch::nn::Module&)>;

/// "Is it one of these types?"
template <class... Impls>
ModulePredicate module_classes() {
  return [](torch::nn::Module& module) { return ((dynamic_cast<Impls*>(&module) != nullptr) || ...); };
}

/// What a custom policy says of one module: whether to wrap it, and what is different about its options.
struct WrapChoice {
  /// A lambda without captures would be taken for a bool too, so only a bool is one.
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

/// What no policy may touch: modules that are ignored with all below them, and parameters that count for nothing.
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

/// With `recurse`: whether to look below the module. Without: whether to wrap it, where `nonwrapped_numel` elements are
/// in no unit below it. Bind further arguments with a lambda.
using AutoWrapFunction = std::function<bool(torch::nn::Module& module, bool recurse, int64_t nonwrapped_numel)>;
WrapPolicy auto_wrap_policy(AutoWrapFunction function);

struct SizeBasedOptions {
  int64_t min_num_params = 100'000'000;  // elements
  /// Not looked into. Default: multi-head attention.
  ModulePredicate force_leaf_modules = nullptr;
  /// Never wrapped. Default: list and dict containers.
  ModulePredicate exclude_wrap_modules = nullptr;
};
WrapPolicy size_based_auto_wrap_policy(SizeBasedOptions options = {});

}  // namespace tessera
