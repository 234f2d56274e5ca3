#include "parallel/prepare_module.h"

#include "base/error.h"
#include "nn/hook_point.h"
#include "parallel/style_tensors.h"

namespace tessera {

namespace {

/// What happens to a list of tensors, inputs or outputs.
struct Preparation {
  const char* what;  // "input" or "output"
  Layouts layouts;
  Layouts desired;
  bool use_local_output = false;
  StyleInputOptions options;

  void operator()(const DeviceMesh& mesh, TensorRefs tensors) const {
    TESSERA_CHECK(ValueError, tensors.size() == layouts.size(),
                  "{}: forward's {}s hold {} tensors, but there are {} {}_layouts. Give one for each defined tensor, "
                  "std::nullopt for those to leave alone",
                  options.where, what, tensors.size(), layouts.size(), what);
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (layouts[i]) {
        const auto placed = style_input(*tensors[i], mesh, *layouts[i], *desired[i], options);
        *tensors[i] = use_local_output ? to_local(placed) : placed;
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

void prepare_inputs(const StyleTarget& target, const std::string& where, const PrepareModuleInputOptions& options) {
  hook_point(target.module, where)
      .register_forward_pre_hook(
          [mesh = target.mesh, prepare = Preparation{.what = "input",
                                                     .layouts = options.input_layouts,
                                                     .desired = options.desired_input_layouts,
                                                     .use_local_output = options.use_local_output,
                                                     .options = {.where = where, .even_shards = options.even_shards}}](
              HookPoint&, TensorRefs tensors) { prepare(mesh, tensors); });
}

void prepare_outputs(const StyleTarget& target, const std::string& where, const PrepareModuleOutputOptions& options) {
  hook_point(target.module, where)
      .register_forward_hook(
          [mesh = target.mesh, prepare = Preparation{.what = "output",
                                                     .layouts = options.output_layouts,
                                                     .desired = options.desired_output_layouts,
                                                     .use_local_output = options.use_local_output,
                                                     .options = {.where = where, .even_shards = options.even_shards}}](
              HookPoint&, TensorRefs tensors) { prepare(mesh, tensors); });
}

}  // namespace

PrepareModuleInput::PrepareModuleInput(PrepareModuleInputOptions options) : options_(std::move(options)) {
  check_layouts("PrepareModuleInput", "input", options_.input_layouts, options_.desired_input_layouts);
}

void PrepareModuleInput::check(const StyleTarget& target) const {
  hook_point(target.module, describe(target));
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
  check_layouts("PrepareModuleInputOutput", "input", options_.input.input_layouts,
                options_.input.desired_input_layouts);
  check_layouts("PrepareModuleInputOutput", "output", options_.output.output_layouts,
                options_.output.desired_output_layouts);
}

void PrepareModuleInputOutput::check(const StyleTarget& target) const {
  hook_point(target.module, describe(target));
}

void PrepareModuleInputOutput::apply(const StyleTarget& target) const {
  prepare_inputs(target, describe(target), options_.input);
  prepare_outputs(target, describe(target), options_.output);
}

}  // namespace tessera
