#include "parallel/parallel_style.h"

#include "base/error.h"
#include "dtensor/local/parameter_origin.h"
#include "parallel/distribute_module.h"

namespace tessera {

namespace {

/// Returns the parameter, undefined if there is none.
at::Tensor own_parameter(const torch::nn::Module& module, const std::string& name) {
  const auto parameters = module.named_parameters(/*recurse=*/false);
  const auto* found = parameters.find(name);
  return found ? *found : at::Tensor();
}

/// Returns the parameter or buffer, undefined if there is none.
at::Tensor own_tensor(const torch::nn::Module& module, const std::string& name) {
  if (const auto parameter = own_parameter(module, name); parameter.defined()) {
    return parameter;
  }
  const auto buffers = module.named_buffers(/*recurse=*/false);
  const auto* found = buffers.find(name);
  return found ? *found : at::Tensor();
}

/// Returns the path of tensor `name` of `module` relative to the target, such as "norm.weight".
std::string name_below(const StyleTarget& target, const torch::nn::Module& module, const std::string& name) {
  for (const auto& item : target.module.named_modules("", /*include_self=*/false)) {
    if (item.value().get() == &module) {
      return item.key() + "." + name;
    }
  }
  return name;
}

/// Throws if another style of the plan requests another placement of the tensor.
void claim(const ParallelStyle& style, const StyleTarget& target, const torch::nn::Module& module,
           const std::string& name, const at::Tensor& tensor, const Placement& placement) {
  if (!target.claims) {
    return;
  }
  const auto own = style.describe(target);
  const auto& first =
      target.claims->try_emplace(tensor.unsafeGetTensorImpl(), StyleClaim{own, placement}).first->second;
  TESSERA_CHECK(ValueError, first.placement == placement,
                "{}: its \"{}\" would be {}, but {} of the same plan makes it {}. Use one style a parameter, also for "
                "tied ones",
                own, name_below(target, module, name), placement, first.style, first.placement);
}

/// Redistributes a gradient that arrives as Partial, or replicated for a sharded parameter. The parameter may have
/// other placements by the time of backward (fully_shard), so the gradient's own placements count. A parameter that is
/// frozen now may be trained later, but only tensors that require a gradient accept hooks.
void keep_gradient_placed(const at::Tensor& parameter, const DeviceMesh& mesh, const Placement& placement) {
  if (!parameter.is_floating_point() && !parameter.is_complex()) {
    return;
  }
  const bool is_frozen = !parameter.requires_grad();
  parameter.set_requires_grad(true);
  parameter.register_hook([mesh, placement](const at::Tensor& grad) {
    return is_dtensor(grad) && device_mesh(grad) == mesh ? redistribute(grad, {placement}) : grad;
  });
  parameter.set_requires_grad(!is_frozen);
}

}  // namespace

void ParallelStyle::check(const StyleTarget& /*target*/) const {}

std::string ParallelStyle::describe(const StyleTarget& target) const {
  return target.path.empty() ? name() + "(the module itself)" : fmt::format("{}(\"{}\")", name(), target.path);
}

void check_style_parameter(const ParallelStyle& style, const StyleTarget& target, const torch::nn::Module& module,
                           const std::string& name, const Placement& placement) {
  const auto tensor = own_tensor(module, name);
  if (!tensor.defined()) {
    return;
  }
  const auto wanted = normalized({placement}, tensor.dim(), target.mesh.ndim(), style.describe(target).c_str());
  claim(style, target, module, name, tensor, wanted[0]);
  TESSERA_CHECK(ValueError, !belongs_to_unit(tensor),
                "{}: its \"{}\" belongs to a unit of fully_shard or replicate already; call parallelize_module before "
                "fully_shard and replicate",
                style.describe(target), name_below(target, module, name));
  if (!is_dtensor(tensor)) {
    TESSERA_CHECK(ValueError, tensor.is_meta() || tensor.device().type() == target.mesh.device_type(),
                  "{}: its \"{}\" is on {}, but the mesh is {}; move the module to the mesh's device first",
                  style.describe(target), name_below(target, module, name), tensor.device().str(), target.mesh);
    TESSERA_CHECK(StateError, !tensor.grad().defined(),
                  "{}: its \"{}\" has a gradient already, which would stay whole; call zero_grad() before "
                  "parallelize_module",
                  style.describe(target), name_below(target, module, name));
    return;
  }
  const auto& spec = dtensor_spec(tensor);
  TESSERA_CHECK(ValueError, spec->mesh() == target.mesh && spec->placements() == wanted,
                "{}: its \"{}\" is {} already, and the style needs {} on {}. Use one style a parameter, also for tied "
                "ones",
                style.describe(target), name_below(target, module, name), spec->to_string(), to_string(wanted),
                target.mesh);
}

void distribute_style_parameter(const ParallelStyle& style, const StyleTarget& target, torch::nn::Module& module,
                                const std::string& name, const Placement& placement) {
  check_style_parameter(style, target, module, name, placement);
  const auto tensor = own_tensor(module, name);
  if (!tensor.defined() || is_dtensor(tensor)) {
    return;
  }
  distribute_parameter(module, name, target.mesh, {placement}, target.distribute);
  if (own_parameter(module, name).defined()) {
    keep_gradient_placed(tensor, target.mesh, placement);
  }
}

}  // namespace tessera
