#include "fully_shard/fully_shard.h"

#include <fmt/ranges.h>

#include "base/error.h"
#include "comm/process_group.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fsdp_state.h"
#include "fully_shard/managed_params.h"

namespace tessera {

namespace {

DeviceMesh default_mesh(const std::vector<ManagedParam>& params) {
  if (!is_initialized()) {
    init_process_group();
  }
  const auto device = params.empty() ? at::kCPU : params[0].tensor.device().type();
  return init_device_mesh(device, {get_world_size()}, {"dp"});
}

void check_param(const ManagedParam& param, const ManagedParam& first, const DeviceMesh& mesh,
                 const std::string& label) {
  const auto& tensor = param.tensor;
  if (is_dtensor(tensor)) {
    const auto& origin = dtensor_meta(tensor)->origin;
    TESSERA_CHECK(ValueError, origin == nullptr,
                  "fully_shard({}): parameter '{}' belongs to the unit {} already, as '{}'. Shard submodules before "
                  "the modules that contain them; a parameter that two modules share must be in one unit, that of a "
                  "module that contains both",
                  label, param.name, origin->module, origin->name);
    TESSERA_CHECK(NotImplementedError, false,
                  "fully_shard({}): parameter '{}' is a DTensor, {}; sharding it over a further mesh axis is not "
                  "supported",
                  label, param.name, dtensor_spec(tensor)->to_string());
  }
  TESSERA_CHECK(
      ValueError, tensor.dim() > 0,
      "fully_shard({}): parameter '{}' is a scalar (no dims), which has no rows to shard; make it a tensor of "
      "size {{1}}",
      label, param.name);
  TESSERA_CHECK(ValueError, tensor.is_leaf(),
                "fully_shard({}): parameter '{}' is the result of differentiable ops; detach() it before registering",
                label, param.name);
  TESSERA_CHECK(
      ValueError, tensor.scalar_type() == first.tensor.scalar_type(),
      "fully_shard({}): parameters of one unit need one dtype, but '{}' is {} and '{}' is {}; convert one, or "
      "make the module that holds it a unit of its own",
      label, first.name, c10::toString(first.tensor.scalar_type()), param.name, c10::toString(tensor.scalar_type()));
  TESSERA_CHECK(ValueError, c10::isFloatingType(tensor.scalar_type()) || !tensor.requires_grad(),
                "fully_shard({}): parameter '{}' is {}", label, param.name, c10::toString(tensor.scalar_type()));
  TESSERA_CHECK(ValueError, tensor.device().type() == mesh.device_type(),
                "fully_shard({}): parameter '{}' is on {}, but the mesh is {}; move the module to the mesh's device "
                "first",
                label, param.name, tensor.device().str(), mesh);
}

std::unique_ptr<ParamGroup> make_group(const std::vector<ManagedParam>& params, const DeviceMesh& mesh,
                                       const MixedPrecisionPolicy& policy, const std::string& label) {
  if (params.empty()) {
    return nullptr;
  }
  std::vector<NamedParam> named;
  for (const auto& param : params) {
    named.push_back(
        {.tensor = param.tensor, .origin = std::make_shared<ParameterOrigin>(ParameterOrigin{param.name, label})});
  }
  return std::make_unique<ParamGroup>(named, mesh, policy);
}

}  // namespace

void fully_shard(torch::nn::Module& module, FullyShardOptions options) {
  auto& point = hook_point(module, "fully_shard");
  const auto label = point.type_name();
  TESSERA_CHECK(StateError, !point.find<FSDPState>(), "fully_shard({}): the module is a unit already; call it once",
                label);
  const auto params = collect_managed_params(module);
  const auto mesh = options.mesh ? *options.mesh : default_mesh(params);
  TESSERA_CHECK(ValueError, mesh.defined() && mesh.ndim() == 1,
                "fully_shard({}): the mesh is {}, but one axis is needed; pass the data-parallel one, as mesh[\"dp\"]",
                label, mesh);
  for (const auto& param : params) {
    check_param(param, params[0], mesh, label);
  }
  auto state = std::make_shared<FSDPState>(make_group(params, mesh, options.mp_policy, label),
                                           FSDPState::Options{options.reshard_after_forward, options.mp_policy, label});
  state->install(point);
  point.attach(std::move(state));
}

FSDPModule fsdp(torch::nn::Module& module) {
  auto state = find_fsdp_state(module);
  TESSERA_CHECK(StateError, state != nullptr, "fsdp({}): fully_shard was not called on this module", module.name());
  return FSDPModule(module, std::move(state));
}

void FSDPModule::unshard() {
  if (state_->group()) {
    state_->group()->unshard();
  }
}

void FSDPModule::reshard() {
  if (state_->group()) {
    state_->group()->reshard();
  }
}

void FSDPModule::set_reshard_after_forward(bool value, bool recurse) {
  if (!recurse) {
    state_->set_reshard_after_forward(value);
    return;
  }
  for (const auto& state : fsdp_states(*module_)) {
    state->set_reshard_after_forward(value);
  }
}

size_t FSDPModule::unsharded_bytes() const {
  return state_->group() ? state_->group()->unsharded_bytes() : 0;
}

size_t FSDPModule::num_parameters() const {
  return state_->group() ? state_->group()->params().size() : 0;
}

void FSDPModule::check_ready_for_step() const {
  bool has_grad = false;
  for (const auto& state : fsdp_states(*module_)) {
    TESSERA_CHECK(StateError, !state->awaits_backward(),
                  "optimizer step: the forward of {} still awaits its backward; call loss.backward() before step()",
                  state->label());
    if (state->group()) {
      for (const auto& param : state->group()->params()) {
        has_grad = has_grad || param.param().grad().defined();
      }
    }
  }
  TESSERA_CHECK(StateError, has_grad,
                "optimizer step: no parameter of {} has a gradient, so step() would do nothing; call loss.backward() "
                "before step()",
                state_->label());
}

}  // namespace tessera
