#include "fsdp1/wrap_policy.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

namespace tessera {

namespace {

/// Calls `visit` on every module below `module`, children before parents, each once.
void visit_below(torch::nn::Module& module, const WrapScope& scope, std::unordered_set<torch::nn::Module*>& seen,
                 const std::function<void(torch::nn::Module&)>& visit) {
  for (const auto& child : module.children()) {
    if (scope.ignored_modules.count(child.get()) == 0 && seen.insert(child.get()).second) {
      visit_below(*child, scope, seen, visit);
      visit(*child);
    }
  }
}

void visit_below(torch::nn::Module& root, const WrapScope& scope,
                 const std::function<void(torch::nn::Module&)>& visit) {
  std::unordered_set<torch::nn::Module*> seen{&root};
  visit_below(root, scope, seen, visit);
}

int64_t count_elements(const torch::nn::Module& module, const WrapScope& scope) {
  std::unordered_set<const c10::TensorImpl*> seen = scope.ignored_params;
  int64_t numel = 0;
  for (const auto& parameter : module.parameters()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) {
      numel += parameter.numel();
    }
  }
  return numel;
}

/// Asks top-down whether to look into a module, and bottom-up whether to wrap it.
class RecursiveWrap {
 public:
  RecursiveWrap(const AutoWrapFunction& function, const WrapScope& scope) : function_(function), scope_(scope) {}

  /// Returns the number of elements at and below `module` that are in units.
  int64_t run(torch::nn::Module& module, bool is_root) {
    const int64_t numel = count_elements(module, scope_);
    if (!seen_.insert(&module).second || !function_(module, /*recurse=*/true, numel)) {
      return 0;
    }
    int64_t wrapped = 0;
    for (const auto& child : module.children()) {
      if (scope_.ignored_modules.count(child.get()) == 0) {
        wrapped += run(*child, /*is_root=*/false);
      }
    }
    if (is_root || !function_(module, /*recurse=*/false, numel - wrapped)) {
      return wrapped;
    }
    targets_.push_back({.module = &module});
    return numel;
  }

  std::vector<WrapTarget> targets() && { return std::move(targets_); }

 private:
  const AutoWrapFunction& function_;
  const WrapScope& scope_;
  std::unordered_set<torch::nn::Module*> seen_;
  std::vector<WrapTarget> targets_;
};

}  // namespace

WrapPolicy custom_policy(std::function<WrapChoice(torch::nn::Module&)> choose) {
  return WrapPolicy([choose = std::move(choose)](torch::nn::Module& root, const WrapScope& scope) {
    std::vector<WrapTarget> targets;
    visit_below(root, scope, [&](torch::nn::Module& module) {
      if (auto choice = choose(module); choice.wrap) {
        targets.push_back({.module = &module, .overrides = std::move(choice.overrides)});
      }
    });
    return targets;
  });
}

WrapPolicy lambda_auto_wrap_policy(ModulePredicate wraps) {
  return custom_policy([wraps = std::move(wraps)](torch::nn::Module& module) { return WrapChoice(wraps(module)); });
}

WrapPolicy always_wrap_policy() {
  return lambda_auto_wrap_policy([](torch::nn::Module&) { return true; });
}

WrapPolicy auto_wrap_policy(AutoWrapFunction function) {
  return WrapPolicy([function = std::move(function)](torch::nn::Module& root, const WrapScope& scope) {
    RecursiveWrap wrap(function, scope);
    wrap.run(root, /*is_root=*/true);
    return std::move(wrap).targets();
  });
}

WrapPolicy size_based_auto_wrap_policy(SizeBasedOptions options) {
  using torch::nn::ModuleDictImpl;
  using torch::nn::ModuleListImpl;
  if (!options.force_leaf_modules) {
    options.force_leaf_modules = module_classes<torch::nn::MultiheadAttentionImpl>();
  }
  if (!options.exclude_wrap_modules) {
    options.exclude_wrap_modules = module_classes<ModuleListImpl, ModuleDictImpl>();
  }
  return auto_wrap_policy([options = std::move(options)](torch::nn::Module& module, bool recurse, int64_t numel) {
    const auto& excluded = recurse ? options.force_leaf_modules : options.exclude_wrap_modules;
    return numel >= options.min_num_params && !excluded(module);
  });
}

}  // namespace tessera
