#include "parallel/parallelize_module.h"

#include <fmt/ranges.h>

#include "base/close_names.h"
#include "base/error.h"
#include "nn/hooks/hook_point.h"
#include "parallel/path_pattern.h"

namespace tessera {

namespace {

/// Attached to a module's hook point.
struct AppliedStyle {
  std::string name;
};

struct NamedModule {
  std::string path;
  torch::nn::Module* module;
};

std::vector<NamedModule> named_modules(torch::nn::Module& root) {
  std::vector<NamedModule> result{{"", &root}};
  for (const auto& item : root.named_modules("", /*include_self=*/false)) {
    result.push_back({item.key(), item.value().get()});
  }
  return result;
}

[[noreturn]] void throw_no_match(const std::string& pattern, torch::nn::Module& root,
                                 const std::vector<NamedModule>& modules) {
  std::vector<std::string> candidates, children;
  for (const auto& [path, module] : modules) {
    candidates.push_back(generalized_path(pattern, path));
  }
  for (const auto& item : root.named_children()) {
    children.push_back(item.key());
  }
  const auto close = close_names(pattern, candidates);
  const auto hint = close.empty() ? fmt::format("its children are: {}", fmt::join(children, ", "))
                                  : fmt::format("close ones: \"{}\"", fmt::join(close, "\", \""));
  throw KeyError(fmt::format("parallelize_module: no module of {} matches \"{}\"; {}", module_type_name(root), pattern,
                             children.empty() ? "it has no children" : hint));
}

/// A style and a module to apply it to.
struct Application {
  AnyStyle style;
  StyleTarget target;
};

std::string shown(const std::string& path) {
  return path.empty() ? "the module itself" : fmt::format("\"{}\"", path);
}

/// Adds the matches of one entry of the plan. A module that is registered under several names counts once.
void add_matches(std::vector<Application>& applications, const ParallelPlan::Entry& entry, torch::nn::Module& root,
                 const std::vector<NamedModule>& modules, const StyleTarget& like) {
  const size_t first = applications.size();
  bool matched = false;
  for (const auto& [path, module] : modules) {
    if (!matches_path(entry.path, path)) {
      continue;
    }
    matched = true;
    const auto same = [module = module](const Application& other) { return &other.target.module == module; };
    const auto found = std::ranges::find_if(applications, same);
    if (found != applications.end() && static_cast<size_t>(found - applications.begin()) >= first) {
      continue;
    }
    TESSERA_CHECK(StateError, found == applications.end(),
                  "parallelize_module: {} would get {} by \"{}\", but has {} by an earlier entry of the plan; one "
                  "style a module (PrepareModuleInputOutput places both inputs and outputs)",
                  shown(path), entry.style->name(), entry.path, found->style->name());
    applications.push_back({entry.style, StyleTarget{*module, path, like.mesh, like.distribute, like.claims}});
  }
  if (!matched) {
    throw_no_match(entry.path, root, modules);
  }
}

void check_application(const Application& application) {
  const auto& target = application.target;
  if (const auto* point = find_hook_point(target.module)) {
    const auto applied = point->find<AppliedStyle>();
    TESSERA_CHECK(StateError, !applied,
                  "parallelize_module: {} would get {}, but has {} from an earlier call; one style a module",
                  shown(target.path), application.style->name(), applied->name);
  }
  application.style->check(target);
}

}  // namespace

void parallelize_module(ModuleRef module, const DeviceMesh& tp_mesh, const ParallelPlan& plan,
                        DistributeOptions options) {
  TESSERA_CHECK(ValueError, tp_mesh.defined() && tp_mesh.ndim() == 1,
                "parallelize_module: {}, but a style works along one axis; pass mesh[\"tp\"], or whatever that axis is "
                "called",
                tp_mesh);
  const auto modules = named_modules(*module);
  const StyleTarget like{*module, "", tp_mesh, options, std::make_shared<StyleClaims>()};
  std::vector<Application> applications;
  for (const auto& entry : plan.entries()) {
    add_matches(applications, entry, *module, modules, like);
  }
  for (const auto& application : applications) {
    check_application(application);
  }
  for (const auto& [style, target] : applications) {
    style->apply(target);
    if (auto* point = find_hook_point(target.module)) {
      point->attach(std::make_shared<AppliedStyle>(AppliedStyle{style->name()}));
    }
  }
}

}  // namespace tessera
