#include "parallel/prepare_module.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "base/close_names.h"
#include "base/error.h"
#include "nn/hooks/hook_point.h"
#include "parallel/style_tensors.h"

namespace tessera {

namespace {

/// Conversion of a list of tensors, inputs or outputs.
struct Preparation {
  Layouts layouts;
  Layouts desired;
  bool is_named = false;
  bool use_local_output = false;
  StyleInputOptions options;

  void operator()(const DeviceMesh& mesh, TensorRefs tensors) const {
    TESSERA_CHECK(ValueError, tensors.size() == layouts.size(),
                  "{}: forward's {}s hold {} tensors, but there are {} {}. Give one for each defined tensor, "
                  "std::nullopt for those to leave alone",
                  options.where, options.what, tensors.size(), layouts.size(),
                  is_named ? "input_names()" : fmt::format("{}_layouts", options.what));
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (layouts[i]) {
        auto placed = style_input(*tensors[i], mesh, *layouts[i], *desired[i], options);
        *tensors[i] = use_local_output ? moved_local(std::move(placed), *tensors[i]) : placed;
      }
    }
  }
};

void check_layouts(const char* style, const char* what, const Layouts& layouts, const Layouts& desired) {
  TESSERA_CHECK(ValueError, layouts.size() == desired.size(),
                "{0}: {1} {2}_layouts, but {3} desired_{2}_layouts; give both one entry for each tensor", style,
                layouts.size(), what, desired.size());
  for (size_t i = 0; i < layouts.size(); ++i) {
    TESSERA_CHECK(ValueError, layouts[i].has_value() == desired[i].has_value(),
                  "{0}: tensor {1} has {2} in {3}_layouts and {4} in desired_{3}_layouts; give both, or std::nullopt "
                  "twice",
                  style, i, layouts[i] ? layouts[i]->to_string() : "std::nullopt", what,
                  desired[i] ? desired[i]->to_string() : "std::nullopt");
  }
}

void check_options(const char* style, const PrepareModuleInputOptions& options) {
  check_layouts(style, "input", options.input_layouts, options.desired_input_layouts);
  const auto& own = options.input_kwarg_layouts;
  const auto& desired = options.desired_input_kwarg_layouts;
  const auto same_name = [](const auto& a, const auto& b) { return a.first == b.first; };
  const auto [more, missing] = std::mismatch(own.begin(), own.end(), desired.begin(), desired.end(), same_name);
  TESSERA_CHECK(ValueError, more == own.end() && missing == desired.end(),
                "{}: '{}' is in only one of input_kwarg_layouts and desired_input_kwarg_layouts; give both", style,
                more == own.end()          ? missing->first
                : missing == desired.end() ? more->first
                                           : std::min(more->first, missing->first));
}

/// Layouts by position, for all inputs that the module names.
struct Positions {
  Layouts layouts;
  Layouts desired;
};

Positions resolve_positions(const torch::nn::Module& module, const std::string& where,
                            const PrepareModuleInputOptions& options) {
  Positions positions{.layouts = options.input_layouts, .desired = options.desired_input_layouts};
  if (options.input_kwarg_layouts.empty()) {
    return positions;
  }
  const auto* named = dynamic_cast<const NamedInputs*>(&module);
  TESSERA_CHECK(ValueError, named != nullptr,
                "{}: input_kwarg_layouts name '{}', but {} does not name its inputs. Derive it from NamedInputs "
                "(parallel/prepare_module.h), or give input_layouts, which go by position",
                where, options.input_kwarg_layouts.begin()->first, module_type_name(module));
  const auto names = named->input_names();
  TESSERA_CHECK(ValueError, positions.layouts.size() <= names.size(),
                "{}: {} input_layouts, but the module has {} inputs: {}", where, positions.layouts.size(), names.size(),
                fmt::join(names, ", "));
  positions.layouts.resize(names.size());
  positions.desired.resize(names.size());
  for (const auto& [name, layout] : options.input_kwarg_layouts) {
    const auto found = std::find(names.begin(), names.end(), name);
    const auto close = close_names(name, names);
    TESSERA_CHECK(KeyError, found != names.end(), "{}: the module has no input '{}'; its inputs are {}{}", where, name,
                  fmt::join(names, ", "), close.empty() ? "" : fmt::format(". Is '{}' meant?", close[0]));
    const auto i = static_cast<size_t>(found - names.begin());
    TESSERA_CHECK(ValueError, !positions.layouts[i],
                  "{}: input '{}' has a layout by its name and one by its position, {}; give one", where, name, i);
    positions.layouts[i] = layout;
    positions.desired[i] = options.desired_input_kwarg_layouts.at(name);
  }
  return positions;
}

void prepare_inputs(const StyleTarget& target, const std::string& where, const PrepareModuleInputOptions& options) {
  auto [layouts, desired] = resolve_positions(target.module, where, options);
  if (layouts.empty()) {
    return;
  }
  hook_point(target.module, where)
      .register_forward_pre_hook(
          [mesh = target.mesh, prepare = Preparation{.layouts = std::move(layouts),
                                                     .desired = std::move(desired),
                                                     .is_named = !options.input_kwarg_layouts.empty(),
                                                     .use_local_output = options.use_local_output,
                                                     .options = {.where = where, .even_shards = options.even_shards}}](
              HookPoint&, TensorRefs tensors) { prepare(mesh, tensors); });
}

void prepare_outputs(const StyleTarget& target, const std::string& where, const PrepareModuleOutputOptions& options) {
  if (options.output_layouts.empty()) {
    return;
  }
  hook_point(target.module, where)
      .register_forward_hook(
          [mesh = target.mesh,
           prepare = Preparation{.layouts = options.output_layouts,
                                 .desired = options.desired_output_layouts,
                                 .use_local_output = options.use_local_output,
                                 .options = {.where = where, .what = "output", .even_shards = options.even_shards}}](
              HookPoint&, TensorRefs tensors) { prepare(mesh, tensors); });
}

}  // namespace

PrepareModuleInput::PrepareModuleInput(PrepareModuleInputOptions options) : options_(std::move(options)) {
  check_options("PrepareModuleInput", options_);
}

void PrepareModuleInput::check(const StyleTarget& target) const {
  hook_point(target.module, describe(target));
  resolve_positions(target.module, describe(target), options_);
}

void PrepareModuleInput::apply(const StyleTarget& target) const {
  prepare_inputs(target, describe(target), options_);
}

PrepareModuleOutput::PrepareModuleOutput(PrepareModuleOutputOptions options) : options_(std::move(options)) {
  check_layouts("PrepareModuleOutput", "output", options_.output_layouts, options_.desired_output_layouts);
}

void PrepareModuleOutput::check(const StyleTarget& target) const {
  hook_point(target.module, describe(target));
}

void PrepareModuleOutput::apply(const StyleTarget& target) const {
  prepare_outputs(target, describe(target), options_);
}

PrepareModuleInputOutput::PrepareModuleInputOutput(PrepareModuleInputOutputOptions options)
    : options_(std::move(options)) {
  check_options("PrepareModuleInputOutput", options_.input);
  check_layouts("PrepareModuleInputOutput", "output", options_.output.output_layouts,
                options_.output.desired_output_layouts);
}

void PrepareModuleInputOutput::check(const StyleTarget& target) const {
  hook_point(target.module, describe(target));
  resolve_positions(target.module, describe(target), options_.input);
}

void PrepareModuleInputOutput::apply(const StyleTarget& target) const {
  prepare_inputs(target, describe(target), options_.input);
  prepare_outputs(target, describe(target), options_.output);
}

}  // namespace tessera
