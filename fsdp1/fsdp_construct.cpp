// Construction of FullyShardedDataParallel: determines ignored tensors, ranks and modules, and prepares modules for the
// engine.

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "device_mesh/accelerator.h"
#include "device_mesh/rank_agreement.h"
#include "fsdp1/fsdp.h"
#include "fsdp1/fsdp_group_mesh.h"
#include "fsdp1/fsdp_prepare.h"
#include "fsdp1/wrapper_state.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/replicate.h"
#include "nn/hooks/cast_floating.h"
#include "nn/hooks/hook_point.h"

namespace tessera {

namespace {

using torch::nn::Module;

constexpr const char* kApi = "FullyShardedDataParallel";

bool keeps_after_forward(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::SHARD_GRAD_OP || strategy == ShardingStrategy::_HYBRID_SHARD_ZERO2;
}

void check_arguments(Module& module, const FSDPOptions& options) {
  TESSERA_CHECK(ValueError, !options.process_group || !options.device_mesh,
                "FullyShardedDataParallel({}): process_group and device_mesh are both given; give one",
                module_type_name(module));
  TESSERA_CHECK(ValueError, options.ignored_modules.empty() || options.ignored_states.empty(),
                "FullyShardedDataParallel({}): ignored_modules and ignored_states are both given; give one",
                module_type_name(module));
  for (auto* ignored : options.ignored_modules) {
    TESSERA_CHECK(ValueError, !find_fsdp_unit(*ignored),
                  "FullyShardedDataParallel({}): ignored_modules has {}, which is wrapped itself; ignore it before it "
                  "is wrapped, or not at all",
                  module_type_name(module), module_type_name(*ignored));
  }
  TESSERA_CHECK(ValueError, !find_fsdp_unit(module), "FullyShardedDataParallel({}): the module is wrapped already",
                module_type_name(module));
  hook_point(module, kApi);
}

/// Checks a module that the policy chose. All of them are checked before any is wrapped.
void check_target(const Module& module, Module& target) {
  TESSERA_CHECK(ValueError, !find_fsdp_unit(target),
                "FullyShardedDataParallel({}): the policy chooses {}, which is wrapped already; wrap by hand or by "
                "policy",
                module_type_name(module), module_type_name(target));
  hook_point(target, kApi);
}

/// Ignores a module's parameters, except those of units below it.
void ignore_below(Module& module, WrapScope& scope) {
  scope.ignored_modules.insert(&module);
  for (const auto& parameter : module.parameters(/*recurse=*/false)) {
    scope.ignored_params.insert(parameter.unsafeGetTensorImpl());
  }
  for (const auto& child : module.children()) {
    if (!find_fsdp_unit(*child)) {
      ignore_below(*child, scope);
    }
  }
}

WrapScope make_scope(const FSDPOptions& options) {
  WrapScope scope;
  for (auto* module : options.ignored_modules) {
    ignore_below(*module, scope);
  }
  for (const auto& parameter : options.ignored_states) {
    scope.ignored_params.insert(parameter.unsafeGetTensorImpl());
  }
  return scope;
}

std::vector<at::Tensor> ignored_params(Module& module, const WrapScope& scope) {
  std::vector<at::Tensor> params;
  for (const auto& parameter : module.parameters()) {
    if (scope.ignored_params.count(parameter.unsafeGetTensorImpl()) != 0) {
      params.push_back(parameter);
    }
  }
  return params;
}

/// Returns the device type on which units compute: device_id's, or else the parameters'. Offloaded parameters compute
/// on the accelerator if there is one.
at::DeviceType compute_device_type(const Module& module, const FSDPOptions& options, const WrapScope& scope) {
  if (options.device_id) {
    return at::Device(*options.device_id).type();
  }
  std::optional<std::pair<std::string, at::Device>> first;
  for (const auto& item : module.named_parameters()) {
    const auto device = item.value().device();
    if (device.is_meta() || scope.ignored_params.count(item.value().unsafeGetTensorImpl()) != 0) {
      continue;
    }
    first = first ? first : std::pair(item.key(), device);
    TESSERA_CHECK(ValueError, device.type() == first->second.type(),
                  "FullyShardedDataParallel({}): '{}' is on {}, but '{}' on {}; give device_id, where all are moved",
                  module_type_name(module), first->first, first->second.str(), item.key(), device.str());
  }
  if (first && !first->second.is_cpu()) {
    return first->second.type();
  }
  return options.cpu_offload.offload_params ? accelerator_or_cpu() : at::kCPU;
}

DeviceMesh choose_mesh(Module& module, const FSDPOptions& options, const WrapScope& scope, ShardingStrategy strategy) {
  if (options.device_mesh) {
    const int64_t axes = is_hybrid(strategy) ? 2 : 1;
    TESSERA_CHECK(ValueError, options.device_mesh->ndim() == axes,
                  "FullyShardedDataParallel({}): the mesh is {}, but {} needs {}", module_type_name(module),
                  *options.device_mesh, to_string(strategy), axes == 2 ? "two axes, replicas and shards" : "one axis");
    return *options.device_mesh;
  }
  if (options.process_group) {
    const bool is_pair = options.process_group->replicate_ranks().has_value();
    TESSERA_CHECK(ValueError, is_pair == is_hybrid(strategy), "FullyShardedDataParallel({}): {} takes {}",
                  module_type_name(module), to_string(strategy),
                  is_pair ? "one group" : "a pair of groups, for shards and replicas");
    return mesh_of_groups(*options.process_group, compute_device_type(module, options, scope));
  }
  if (!is_hybrid(strategy)) {
    return init_device_mesh(compute_device_type(module, options, scope), {get_world_size()}, {"dp"});
  }
  TESSERA_CHECK(ValueError, static_cast<bool>(options.auto_wrap_policy),
                "FullyShardedDataParallel({}): {} without groups, mesh and policy: every unit would make groups of its "
                "own; give process_group or device_mesh",
                module_type_name(module), to_string(strategy));
  return mesh_of_hosts(compute_device_type(module, options, scope));
}

/// Moves the root's inputs to its compute device, because a batch may be on the CPU.
void move_inputs(const WrapperState& unit, TensorRefs inputs) {
  const auto& device_id = unit.options.device_id;
  const auto* group = unit.state->group().get();
  const at::Device device = device_id ? at::Device(*device_id)
                            : group   ? group->context().device
                                      : at::Device(unit.mesh.device_type());
  if (device.is_cpu() && !device_id) {
    return;
  }
  for (auto* tensor : inputs) {
    if (tensor->defined() && (device_id || tensor->is_cpu())) {
      *tensor = tensor->to(device);
    }
  }
}

void cast_inputs(WrapperState& unit, TensorRefs inputs) {
  const auto& precision = unit.options.mixed_precision;
  if (unit.casts_around) {
    unit.cast_back_to.reset();
    for (const auto* tensor : inputs) {
      if (tensor->is_floating_point()) {
        unit.cast_back_to = tensor->scalar_type();
      }
    }
    cast_floating(inputs, unit.full_precision);
    return;
  }
  const bool is_root = unit.state->root() && unit.state->root()->is_outermost(*unit.state);
  const bool casts = precision.cast_forward_inputs || (is_root && precision.cast_root_forward_inputs);
  if (precision.param_dtype && casts) {
    cast_floating(inputs, *precision.param_dtype);
  }
  if (is_root) {
    move_inputs(unit, inputs);
  }
}

void install_hooks(Module& module, const std::shared_ptr<WrapperState>& unit) {
  auto& point = hook_point(module, kApi);
  point.register_forward_pre_hook([unit](HookPoint& at, TensorRefs) { check_not_summoned(unit->is_summoned, at); },
                                  HookOrder::Prepend);
  point.register_forward_pre_hook([unit](HookPoint&, TensorRefs inputs) { cast_inputs(*unit, inputs); });
  point.register_forward_hook([unit](HookPoint&, TensorRefs outputs) {
    if (unit->casts_around && unit->cast_back_to) {
      cast_floating(outputs, *unit->cast_back_to);
    }
  });
}

MixedPrecisionPolicy engine_policy(const MixedPrecision& precision) {
  return {.param_dtype = precision.param_dtype,
          .reduce_dtype = precision.reduce_dtype ? precision.reduce_dtype : precision.param_dtype,
          .cast_forward_inputs = false};
}

void make_engine_unit(Module& module, const WrapperState& unit, const WrapScope& scope) {
  const auto ignored = ignored_params(module, scope);
  const auto policy = engine_policy(unit.options.mixed_precision);
  const auto offload = unit.options.cpu_offload.offload_params ? std::optional(CPUOffloadPolicy{}) : std::nullopt;
  if (unit.strategy == ShardingStrategy::NO_SHARD) {
    replicate(module, {.mesh = unit.mesh,
                       .mp_policy = policy,
                       .offload_policy = offload,
                       .ignored_params = ignored,
                       .bucket_cap_mb = 0});
  } else {
    FullyShardOptions engine{
        .mesh = unit.mesh, .mp_policy = policy, .offload_policy = offload, .ignored_params = ignored};
    if (keeps_after_forward(unit.strategy)) {
      engine.reshard_after_forward = false;
    }
    fully_shard(module, engine);
  }
}

struct WrapOne {
  const FSDPOptions& options;  // with the mesh, and without a policy
  const WrapScope& scope;
  bool mesh_was_given;
  bool casts_around = false;
};

void wrap_one(Module& module, const WrapOne& request) {
  const auto& options = request.options;
  const auto& scope = request.scope;
  const auto where = fmt::format("FullyShardedDataParallel({})", module_type_name(module));
  const auto modules = modules_to_prepare(module, scope);
  auto unit = std::make_shared<WrapperState>();
  unit->options = options;
  unit->mesh = options.device_mesh.value();
  unit->strategy = options.sharding_strategy.value_or(ShardingStrategy::FULL_SHARD);
  unit->mesh_was_given = request.mesh_was_given;
  unit->casts_around = request.casts_around;
  if (!is_hybrid(unit->strategy) && unit->mesh.size() == 1) {
    unit->strategy = ShardingStrategy::NO_SHARD;
  }
  check_ranks_agree({unit->mesh}, where, [&] {
    if (auto& device_id = unit->options.device_id) {
      device_id = device_id->resolved();
    }
    prepare_modules(modules, scope, unit->options, where);
    return std::vector<std::string>();
  });
  if (options.sync_module_states) {
    sync_states(modules, scope, unit->mesh);
  }
  make_engine_unit(module, *unit, scope);
  unit->state = find_fsdp_state(module);
  auto& settings = unit->state->settings();
  if (!options.forward_prefetch) {
    settings.forward_prefetch = FSDPState::Targets();
  }
  if (!options.backward_prefetch) {
    settings.backward_prefetch = FSDPState::Targets();
  }
  settings.prefetch_after_backward = options.backward_prefetch == BackwardPrefetch::BACKWARD_POST;
  cast_buffers(modules, scope, *unit);
  install_hooks(module, unit);
  hook_point(module, kApi).attach(unit);
}

/// Returns the modules that stay in full precision, if requested and there is a policy.
std::vector<Module*> full_precision_modules(Module& root, const FSDPOptions& options, const WrapScope& scope) {
  const auto& precision = options.mixed_precision;
  std::vector<Module*> modules;
  if (precision.param_dtype && precision.module_classes_to_ignore) {
    for (const auto& target : lambda_auto_wrap_policy(precision.module_classes_to_ignore).select(root, scope)) {
      modules.push_back(target.module);
    }
  }
  return modules;
}

}  // namespace

void wrap_with_fsdp(Module& module, FSDPOptions options) {
  check_arguments(module, options);
  const auto scope = make_scope(options);
  const auto strategy = options.sharding_strategy.value_or(ShardingStrategy::FULL_SHARD);
  const bool mesh_was_given = options.device_mesh.has_value();
  options.device_mesh = choose_mesh(module, options, scope, strategy);
  options.process_group.reset();
  const auto policy = std::exchange(options.auto_wrap_policy, WrapPolicy());
  if (policy) {
    const auto full_precision = full_precision_modules(module, options, scope);
    auto targets = policy.select(module, scope);
    for (const auto& target : targets) {
      check_target(module, *target.module);
    }
    for (auto* own : full_precision) {
      check_target(module, *own);
    }
    for (auto* own : full_precision) {
      std::erase_if(targets, [&](const WrapTarget& target) { return target.module == own; });
      FSDPOptions child = options;
      child.mixed_precision = {};
      wrap_one(*own, {child, scope, mesh_was_given, /*casts_around=*/true});
    }
    for (const auto& target : targets) {
      FSDPOptions child = options;
      if (target.overrides) {
        target.overrides(child);
      }
      wrap_one(*target.module, {child, scope, mesh_was_given});
    }
  }
  wrap_one(module, {options, scope, mesh_was_given});
}

}  // namespace tessera
