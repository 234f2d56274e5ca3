#include "fully_shard/check_params.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_set>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "fully_shard/composable_apis.h"
#include "fully_shard/layout/stacked_spec.h"

namespace tessera {

namespace {

void check_unmanaged(const ManagedParam& param, const std::string& where) {
  const auto* meta = dtensor_meta(param.tensor);
  const auto origin = meta ? meta->origin : nullptr;
  TESSERA_CHECK(ValueError, origin == nullptr,
                "{}: parameter '{}' belongs to the unit {} already, as '{}'. Shard submodules before "
                "the modules that contain them; a parameter that two modules share must be in one unit, that of a "
                "module that contains both, or of a list of both",
                where, param.name, origin->module, origin->name);
}

/// Returns the tensor-parallel spec of a parameter, or null for a plain one.
SpecPtr checked_tp_spec(const ManagedParam& param, const DeviceMesh& mesh, const std::string& where) {
  if (!is_dtensor(param.tensor)) {
    return nullptr;
  }
  const auto& spec = dtensor_spec(param.tensor);
  TESSERA_CHECK(ValueError, !spec->has_partial(),
                "{}: parameter '{}' is a DTensor, {}, whose ranks hold terms of a sum and no values; distribute it as "
                "Shard or Replicate",
                where, param.name, spec->to_string());
  const auto reason = why_not_stacked(mesh, spec->mesh());
  TESSERA_CHECK(ValueError, reason.empty(), "{}: parameter '{}' is a DTensor, {}, but {}", where, param.name,
                spec->to_string(), reason);
  return spec;
}

/// Returns whether the device is valid. Meta tensors may get memory anywhere later; offloaded ones are already on the
/// CPU.
bool fits_device(const at::Tensor& tensor, const ParamRequirements& required) {
  return tensor.is_meta() || tensor.device().type() == required.mesh.device_type() ||
         (required.options.offload_policy && tensor.is_cpu());
}

void check_tensor(const ManagedParam& param, const ParamRequirements& required) {
  const auto& where = required.where;
  const auto& tensor = param.tensor;
  TESSERA_CHECK(ValueError, tensor.dim() > 0,
                "{}: parameter '{}' is a scalar (no dims), which has no rows to shard; make it a tensor of "
                "size {{1}}",
                where, param.name);
  TESSERA_CHECK(ValueError, tensor.is_leaf(),
                "{}: parameter '{}' is the result of differentiable ops; detach() it before registering", where,
                param.name);
  TESSERA_CHECK(ValueError, tensor.layout() == c10::kStrided && tensor.is_contiguous(),
                "{}: parameter '{}' is not contiguous, sizes [{}] and strides [{}]; set_data() it to its "
                "contiguous() first",
                where, param.name, fmt::join(tensor.sizes(), ", "), fmt::join(tensor.strides(), ", "));
  TESSERA_CHECK(
      NotImplementedError, !c10::isComplexType(tensor.scalar_type()) || !tensor.requires_grad(),
      "{}: parameter '{}' is {}, and complex parameters are not trained in shards; register at::view_as_real() "
      "of it, or name it in ignored_params",
      where, param.name, c10::toString(tensor.scalar_type()));
  TESSERA_CHECK(ValueError, fits_device(tensor, required),
                "{}: parameter '{}' is on {}, but the mesh is {}; move the module to the mesh's device "
                "first",
                where, param.name, tensor.device().str(), required.mesh);
  TESSERA_CHECK(StateError, !tensor.grad().defined(),
                "{}: parameter '{}' has a gradient already, which sharding would lose; call zero_grad() "
                "before fully_shard",
                where, param.name);
}

void check_same_device(const ManagedParam& param, const ManagedParam& first, const std::string& where) {
  TESSERA_CHECK(ValueError, param.tensor.device() == first.tensor.device(),
                "{}: parameters of one unit need one device, but '{}' is on {} and '{}' on {}", where, first.name,
                first.tensor.device().str(), param.name, param.tensor.device().str());
}

/// Throws unless trained parameters have one dtype, because their gradients are reduced together.
void check_trained_dtypes(const std::vector<ManagedParam>& params, const std::string& where) {
  const auto is_trained = [](const ManagedParam& param) { return param.tensor.requires_grad(); };
  const auto first = std::ranges::find_if(params, is_trained);
  for (auto param = first; param != params.end(); ++param) {
    TESSERA_CHECK(ValueError, !is_trained(*param) || param->tensor.scalar_type() == first->tensor.scalar_type(),
                  "{}: parameters of one unit that require a gradient need one dtype, but '{}' is {} and '{}' is {}; "
                  "convert or freeze one, or make the module that holds it a unit of its own",
                  where, first->name, c10::toString(first->tensor.scalar_type()), param->name,
                  c10::toString(param->tensor.scalar_type()));
  }
}

int64_t choose_shard_dim(const ManagedParam& param, const ShardPlacementFn& shard_placement_fn,
                         const std::string& where) {
  const auto placement = shard_placement_fn ? shard_placement_fn(param.tensor) : std::nullopt;
  if (!placement) {
    return 0;
  }
  const int64_t ndim = param.tensor.dim();
  const int64_t dim = placement->dim() < 0 ? placement->dim() + ndim : placement->dim();
  TESSERA_CHECK(ValueError, dim >= 0 && dim < ndim,
                "{}: shard_placement_fn gives {} for parameter '{}', which has {} dims", where, *placement, param.name,
                ndim);
  return dim;
}

}  // namespace

std::vector<ManagedParam> collect_managed_params(const std::vector<torch::nn::Module*>& modules,
                                                 const std::vector<at::Tensor>& ignored) {
  std::unordered_set<c10::TensorImpl*> seen;
  for (const auto& param : ignored) {
    seen.insert(param.unsafeGetTensorImpl());
  }
  std::vector<ManagedParam> params;
  for (size_t i = 0; i < modules.size(); ++i) {
    const std::string place = modules.size() == 1 ? "" : std::to_string(i) + ".";
    for (const auto& [name, module] : named_managed_modules(*modules[i])) {
      for (const auto& item : module->named_parameters(/*recurse=*/false)) {
        if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second) {
          const auto dot = name.empty() ? "" : ".";
          params.push_back({fmt::format("{}{}{}{}", place, name, dot, item.key()), item.value()});
        }
      }
    }
  }
  return params;
}

std::vector<ParamInfo> checked_params(const std::vector<ManagedParam>& params, const ParamRequirements& required) {
  std::vector<ParamInfo> checked;
  for (const auto& param : params) {
    check_unmanaged(param, required.where);
    check_tensor(param, required);
    check_same_device(param, params[0], required.where);
    checked.push_back({.tensor = param.tensor,
                       .origin = std::make_shared<ParameterOrigin>(ParameterOrigin{param.name, required.label}),
                       .shard_dim = choose_shard_dim(param, required.options.shard_placement_fn, required.where),
                       .tp_spec = checked_tp_spec(param, required.mesh, required.where),
                       .gather = gather_item(param, required.options)});
  }
  check_trained_dtypes(params, required.where);
  return checked;
}

GatherItem gather_item(const ManagedParam& param, const FullyShardOptions& options) {
  const auto& policy = options.mp_policy;
  const auto& extension = options.all_gather_extension_fn;
  const auto own = param.tensor.scalar_type();
  const auto usual = c10::isFloatingType(own) ? policy.param_dtype.value_or(own) : own;
  std::optional<at::ScalarType> dtype;
  if (policy.param_dtype_override_fn) {
    dtype = policy.param_dtype_override_fn(param.tensor, param.name);
  }
  return {.dtype = dtype.value_or(usual), .extension = extension ? extension(param.tensor, param.name) : nullptr};
}

std::vector<std::string> describe(const std::vector<ParamInfo>& params) {
  std::vector<std::string> texts;
  for (const auto& param : params) {
    const auto& spec = param.tp_spec;
    const auto& [dtype, extension] = param.gather;
    const bool casts = dtype != param.tensor.scalar_type();
    texts.push_back(fmt::format(
        "'{}' {} {}{}{}{}{}{}", param.origin->name, to_string(TensorMeta::of(param.tensor)), Shard(param.shard_dim),
        spec ? fmt::format(" on {} {}", to_string(spec->placements()), spec->mesh()) : "",
        casts ? fmt::format(", computes in {}", c10::toString(dtype)) : "", extension ? ", sent by an extension" : "",
        param.tensor.requires_grad() ? "" : ", frozen", param.tensor.is_meta() ? ", on the meta device" : ""));
  }
  return texts;
}

std::vector<DeviceMesh> tensor_parallel_meshes(const std::vector<ManagedParam>& params) {
  std::vector<DeviceMesh> meshes;
  for (const auto& param : params) {
    const auto* meta = dtensor_meta(param.tensor);
    if (meta && !meta->origin && std::ranges::find(meshes, meta->spec->mesh()) == meshes.end()) {
      meshes.push_back(meta->spec->mesh());
    }
  }
  return meshes;
}

}  // namespace tessera
