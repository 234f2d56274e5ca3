#include "fully_shard/make_unit.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <optional>

#include "base/error.h"
#include "comm/process_group.h"
#include "device_mesh/accelerator.h"
#include "device_mesh/rank_agreement.h"
#include "dtensor/local/dtensor_impl.h"
#include "fully_shard/check_params.h"
#include "fully_shard/engine/fsdp_root.h"

namespace tessera {

namespace {

constexpr double kMebibyte = 1024 * 1024;
constexpr double kLargestBucketMb = 1024 * 1024;

/// Makes the default mesh. Parameters on meta, and offloaded ones on the CPU, compute on the accelerator if there is
/// one.
DeviceMesh default_mesh(const std::vector<ManagedParam>& params, bool offloads) {
  if (!is_initialized()) {
    init_process_group();
  }
  auto device = params.empty() ? at::kCPU : params[0].tensor.device().type();
  if (device == at::kMeta || (device == at::kCPU && offloads)) {
    device = accelerator_or_cpu();
  }
  return init_device_mesh(device, {get_world_size()}, {"dp"});
}

std::string join_type_names(const std::vector<HookPoint*>& points) {
  std::vector<std::string> names;
  names.reserve(points.size());
  for (const auto* point : points) {
    names.push_back(point->type_name());
  }
  return points.size() == 1 ? names[0] : fmt::format("[{}]", fmt::join(names, ", "));
}

/// Returns the group size of post-forward shards; 0 if reshard_after_forward is a bool.
int64_t post_forward_ranks(const FullyShardOptions& options, const DeviceMesh& mesh, const std::string& where) {
  if (!options.reshard_after_forward || !options.reshard_after_forward->group_size()) {
    return 0;
  }
  const int64_t size = *options.reshard_after_forward->group_size();
  const int64_t ranks = mesh.size(mesh.ndim() - 1);
  TESSERA_CHECK(ValueError, size >= 1 && size <= ranks && ranks % size == 0,
                "{}: reshard_after_forward = {}; as a number of ranks it divides the {} of the sharding axis", where,
                size, ranks);
  return size == 1 || size == ranks ? 0 : size;
}

/// Converts the option to a bool. A group size of 1 means false; one of all ranks means true.
std::optional<bool> reshards_after_forward(const FullyShardOptions& options) {
  if (!options.reshard_after_forward) {
    return std::nullopt;
  }
  const auto size = options.reshard_after_forward->group_size();
  return size ? *size > 1 : options.reshard_after_forward->is_on();
}

/// Plan of a new unit: the user's request and values derived from it.
struct UnitPlan {
  const UnitConfig& request;
  std::vector<HookPoint*> points;
  std::string label;  // types of the modules
  std::string where;  // "fully_shard(Block)"
  DeviceMesh mesh;
  std::vector<ParamInfo> params;
  ParamGroup::Options group = {};
};

void check_mesh(const UnitPlan& unit_plan) {
  const int64_t ndim = unit_plan.mesh.defined() ? unit_plan.mesh.ndim() : 0;
  if (unit_plan.request.kind == DataParallelKind::Replicate) {
    TESSERA_CHECK(ValueError, ndim == 1,
                  "{}: the mesh is {}, but one axis is needed; pass the data-parallel one, as mesh[\"dp\"]",
                  unit_plan.where, unit_plan.mesh);
  } else {
    TESSERA_CHECK(ValueError, ndim == 1 || ndim == 2,
                  "{}: the mesh is {}, but one axis is needed, or two, replicas and shards; pass the data-parallel "
                  "ones, as mesh[\"dp\"]",
                  unit_plan.where, unit_plan.mesh);
  }
}

void plan(UnitPlan& unit_plan, const std::vector<ManagedParam>& params) {
  const auto& points = unit_plan.points;
  for (size_t i = 0; i < points.size(); ++i) {
    const auto state = points[i]->find<FSDPState>();
    TESSERA_CHECK(StateError, !state,
                  "{}: {} is a unit already, of {}; a module has one of fully_shard and replicate, once",
                  unit_plan.where, points[i]->type_name(), state ? state->api() : "");
    TESSERA_CHECK(ValueError, std::find(points.begin(), points.begin() + i, points[i]) == points.begin() + i,
                  "{}: module {} of the list is in it twice", unit_plan.where, i);
  }
  unit_plan.params = checked_params(params, {.mesh = unit_plan.mesh,
                                             .options = unit_plan.request.options,
                                             .label = unit_plan.label,
                                             .where = unit_plan.where});
  const double cap = unit_plan.request.bucket_cap_mb;
  TESSERA_CHECK(ValueError, cap >= 0 && cap <= kLargestBucketMb,
                "{}: bucket_cap_mb = {}; it is from 0 (each unit has its own all-reduce) to {} MiB", unit_plan.where,
                cap, kLargestBucketMb);
  unit_plan.group = group_options(unit_plan.request, unit_plan.mesh, unit_plan.where);
}

std::string describe_plan(const UnitPlan& unit_plan) {
  const auto& options = unit_plan.request.options;
  const auto dtype = [](std::optional<at::ScalarType> type) { return type ? c10::toString(*type) : "as it is"; };
  const auto& reshard = options.reshard_after_forward;
  return fmt::format("a unit {} over {}, reshard_after_forward {}, param_dtype {}, reduce_dtype {}{}{}",
                     unit_plan.where, unit_plan.mesh, reshard ? reshard->to_string() : "by default",
                     dtype(options.mp_policy.param_dtype), dtype(options.mp_policy.reduce_dtype),
                     options.offload_policy ? ", offloaded to the CPU" : "",
                     unit_plan.request.kind == DataParallelKind::Replicate
                         ? fmt::format(", bucket_cap_mb {}", unit_plan.request.bucket_cap_mb)
                         : "");
}

/// Plans the unit and throws on every rank unless all ranks have the same plan; a rank that could not plan throws its
/// own error. Ranks that share parameters by tensor parallelism run the unit together, so they are compared too.
void plan_together(UnitPlan& unit_plan, const std::vector<ManagedParam>& params) {
  auto meshes = tensor_parallel_meshes(params);
  meshes.insert(meshes.begin(), unit_plan.mesh);
  check_ranks_agree(meshes, unit_plan.where, [&] {
    plan(unit_plan, params);
    std::vector<std::string> items{describe_plan(unit_plan)};
    const auto texts = describe(unit_plan.params);
    items.insert(items.end(), texts.begin(), texts.end());
    return items;
  });
}

std::shared_ptr<UnitRecipe> make_recipe(const UnitPlan& unit_plan) {
  static std::atomic<int64_t> made = 0;
  auto recipe =
      std::make_shared<UnitRecipe>(UnitRecipe{.request = unit_plan.request, .tp_specs = {}, .number = ++made});
  recipe->request.options.mesh = unit_plan.mesh;
  for (const auto& param : unit_plan.params) {
    if (param.tp_spec) {
      recipe->tp_specs[param.origin->name] = param.tp_spec;
    }
  }
  return recipe;
}

/// Returns whether to create shards outside InferenceMode, which is needed if parameters may be trained.
bool leaves_inference_mode(const std::vector<ManagedParam>& params) {
  return c10::InferenceMode::is_enabled() &&
         std::ranges::none_of(params, [](const ManagedParam& param) { return param.tensor.is_inference(); });
}

}  // namespace

ParamGroup::Options group_options(const UnitConfig& request, const DeviceMesh& mesh, const std::string& where) {
  const auto& options = request.options;
  return {.api = request.api,
          .axes = request.kind == DataParallelKind::Replicate ? DataParallelAxes::replicated(mesh)
                                                              : DataParallelAxes::sharded(mesh),
          .policy = options.mp_policy,
          .offload = options.offload_policy,
          .post_forward_ranks = post_forward_ranks(options, mesh, where),
          .bucket_bytes = static_cast<int64_t>(request.bucket_cap_mb * kMebibyte)};
}

at::Tensor unsharded_on_meta(const at::Tensor& param, const SpecPtr& tp_spec, at::ScalarType dtype) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto options = at::TensorOptions(at::kMeta).dtype(dtype);
  const auto full =
      tp_spec ? wrap_local(at::empty(tp_spec->local_sizes(), options), tp_spec) : at::empty(param.sizes(), options);
  return full.set_requires_grad(param.requires_grad());
}

void make_unit(const UnitConfig& request) {
  UnitPlan unit_plan{.request = request, .points = {}, .label = {}, .where = {}, .mesh = {}, .params = {}};
  const auto& options = request.options;
  TESSERA_CHECK(ValueError, !request.modules.empty(), "{}: the list of modules is empty", request.api);
  for (auto* module : request.modules) {
    unit_plan.points.push_back(&hook_point(*module, request.api));
  }
  unit_plan.label = join_type_names(unit_plan.points);
  unit_plan.where = fmt::format("{}({})", request.api, unit_plan.label);
  const auto params = collect_managed_params(request.modules, options.ignored_params);
  std::optional<c10::InferenceMode> mode;
  if (leaves_inference_mode(params)) {
    mode.emplace(/*enabled=*/false);
  }
  unit_plan.mesh = options.mesh ? *options.mesh : default_mesh(params, options.offload_policy.has_value());
  check_mesh(unit_plan);
  plan_together(unit_plan, params);
  std::shared_ptr<ParamGroup> group;
  if (!unit_plan.params.empty()) {
    group = std::make_shared<ParamGroup>(unit_plan.params, unit_plan.group);
  }
  const auto state = std::make_shared<FSDPState>(
      std::move(group), FSDPState::Options{.reshard_after_forward = reshards_after_forward(options),
                                           .mp_policy = options.mp_policy,
                                           .api = request.api,
                                           .label = unit_plan.label});
  state->install(unit_plan.points);
  const auto recipe = make_recipe(unit_plan);
  for (auto* point : unit_plan.points) {
    point->attach(state);
    point->attach(recipe);
  }
}

}  // namespace tessera
