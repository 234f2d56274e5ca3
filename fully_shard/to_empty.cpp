#include "fully_shard/to_empty.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <unordered_set>

#include "base/error.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/local/tensor_memory.h"
#include "fully_shard/engine/fsdp_root.h"

namespace tessera {

namespace {

using Tensors = torch::OrderedDict<std::string, at::Tensor>;

void check_shard_device(const FSDPState& state, at::Device device) {
  const auto type = state.group()->context().shard_options.device().type();
  const auto belongs = c10::DeviceTypeName(type, /*lower_case=*/true);
  TESSERA_CHECK(ValueError, device.type() == type,
                "to_empty: the shards of {} belong on {}, but the device is {}; pass {}, which the unit's mesh and "
                "offload_policy ask for",
                state.label(), belongs, device.str(), belongs);
}

/// Throws for parameters of units that `module` does not contain.
void check_managed(const Tensors& params, const std::unordered_set<const c10::TensorImpl*>& own) {
  for (const auto& item : params) {
    const auto* meta = item.value().defined() ? dtensor_meta(item.value()) : nullptr;
    TESSERA_CHECK(StateError,
                  !meta || !meta->origin || !item.value().is_meta() || own.contains(item.value().unsafeGetTensorImpl()),
                  "to_empty: parameter '{}' belongs to the unit {}, which is that of a module above; call to_empty on "
                  "that",
                  item.key(), meta && meta->origin ? meta->origin->module : "");
  }
}

void fill_in(const Tensors& tensors, at::Device device) {
  const at::AutoDispatchBelowADInplaceOrView below;
  for (const auto& item : tensors) {
    const auto& tensor = item.value();
    if (!tensor.defined() || !tensor.is_meta()) {
      continue;
    }
    const auto* meta = dtensor_meta(tensor);
    if (!meta) {
      replace_data(tensor, at::empty_like(tensor, tensor.options().device(device).requires_grad(false)));
      continue;
    }
    TESSERA_CHECK(ValueError, device.type() == meta->spec->mesh().device_type(),
                  "to_empty: '{}' is a DTensor on {}, but the device is {}", item.key(), meta->spec->mesh(),
                  device.str());
    auto local = at::empty(meta->spec->local_sizes(), meta->local.options().device(device));
    replace_data(tensor, wrap_local(std::move(local), meta->spec));
  }
}

}  // namespace

void to_empty(ModuleRef module, at::Device device) {
  TESSERA_CHECK(ValueError, device.type() != at::kMeta, "to_empty: the meta device has no memory; pass another");
  const auto states = fsdp_states(*module);
  std::unordered_set<const c10::TensorImpl*> own;
  for (const auto& [path, state] : states) {
    if (!state->group()) {
      continue;
    }
    check_shard_device(*state, device);
    for (const auto& param : state->group()->params()) {
      own.insert(param.param().unsafeGetTensorImpl());
    }
  }
  const auto params = module->named_parameters();
  check_managed(params, own);
  for (const auto& [path, state] : states) {
    if (state->group() && state->group()->unit_params().is_on_meta()) {
      state->group()->materialize();
    }
  }
  fill_in(params, device);
  fill_in(module->named_buffers(), device);
}

}  // namespace tessera
