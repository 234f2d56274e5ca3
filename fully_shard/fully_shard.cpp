#include "fully_shard/fully_shard.h"

#include <fmt/ranges.h>

#include "base/error.h"
#include "comm/process_group.h"
#include "fully_shard/check_params.h"
#include "fully_shard/fsdp_root.h"
#include "fully_shard/managed_params.h"
#include "fully_shard/rank_agreement.h"

namespace tessera {

namespace {

DeviceMesh default_mesh(const std::vector<ManagedParam>& params) {
  if (!is_initialized()) {
    init_process_group();
  }
  const auto device = params.empty() ? at::kCPU : params[0].tensor.device().type();
  return init_device_mesh(device, {get_world_size()}, {"dp"});
}

std::string label_of(const std::vector<HookPoint*>& points) {
  std::vector<std::string> names;
  for (const auto* point : points) {
    names.push_back(point->type_name());
  }
  return points.size() == 1 ? names[0] : fmt::format("[{}]", fmt::join(names, ", "));
}

/// Ranks that keep a share after forward; 0 where a bool says it all.
int64_t smaller_ranks(const FullyShardOptions& options, const DeviceMesh& mesh, const std::string& label) {
  if (!options.reshard_after_forward || !options.reshard_after_forward->group_size()) {
    return 0;
  }
  const int64_t size = *options.reshard_after_forward->group_size();
  const int64_t ranks = mesh.size(mesh.ndim() - 1);
  TESSERA_CHECK(ValueError, size >= 1 && size <= ranks && ranks % size == 0,
                "fully_shard({}): reshard_after_forward = {}; as a number of ranks it divides the {} of the sharding "
                "axis",
                label, size, ranks);
  return size == 1 || size == ranks ? 0 : size;
}

/// A smaller group of one rank is no resharding at all; one of all ranks is the usual one.
std::optional<bool> reshards_after_forward(const FullyShardOptions& options) {
  if (!options.reshard_after_forward) {
    return std::nullopt;
  }
  const auto size = options.reshard_after_forward->group_size();
  return size ? *size > 1 : options.reshard_after_forward->is_on();
}

struct UnitPlan {
  std::vector<NamedParam> params;
  int64_t smaller_ranks = 0;
};

UnitPlan plan_unit(const std::vector<HookPoint*>& points, const std::vector<ManagedParam>& params,
                   const DeviceMesh& mesh, const FullyShardOptions& options) {
  const auto label = label_of(points);
  for (size_t i = 0; i < points.size(); ++i) {
    TESSERA_CHECK(StateError, !points[i]->find<FSDPState>(),
                  "fully_shard({}): the module is a unit already; call it once", points[i]->type_name());
    TESSERA_CHECK(ValueError, std::find(points.begin(), points.begin() + i, points[i]) == points.begin() + i,
                  "fully_shard({}): module {} of the list is in it twice", label, i);
  }
  return {.params = checked_params(params, mesh, options, label), .smaller_ranks = smaller_ranks(options, mesh, label)};
}

std::string describe(const std::string& label, const DeviceMesh& mesh, const FullyShardOptions& options) {
  const auto dtype = [](std::optional<at::ScalarType> type) { return type ? c10::toString(*type) : "as it is"; };
  const auto& reshard = options.reshard_after_forward;
  return fmt::format("a unit {} over {}, reshard_after_forward {}, param_dtype {}, reduce_dtype {}", label, mesh,
                     reshard ? reshard->to_string() : "by default", dtype(options.mp_policy.param_dtype),
                     dtype(options.mp_policy.reduce_dtype));
}

/// The plan, if all ranks have the same; else every rank throws, one that could not plan its own failure.
UnitPlan agreed_plan(const std::vector<HookPoint*>& points, const std::vector<ManagedParam>& params,
                     const DeviceMesh& mesh, const FullyShardOptions& options) {
  const auto label = label_of(points);
  UnitPlan plan;
  std::exception_ptr failure;
  Statement statement{.items = {describe(label, mesh, options)}, .fault = {}};
  try {
    plan = plan_unit(points, params, mesh, options);
    const auto texts = describe(plan.params);
    statement.items.insert(statement.items.end(), texts.begin(), texts.end());
  } catch (const Error& error) {
    failure = std::current_exception();
    statement.fault = error.what();
  }
  try {
    check_agreement(mesh, fmt::format("fully_shard({})", label), statement);
  } catch (const ValueError&) {
    if (failure) {
      std::rethrow_exception(failure);
    }
    throw;
  }
  return plan;
}

}  // namespace

void fully_shard(const std::vector<torch::nn::Module*>& modules, FullyShardOptions options) {
  TESSERA_CHECK(ValueError, !modules.empty(), "fully_shard: the list of modules is empty");
  std::vector<HookPoint*> points;
  for (auto* module : modules) {
    points.push_back(&hook_point(*module, "fully_shard"));
  }
  const auto label = label_of(points);
  const auto params = collect_managed_params(modules, options.ignored_params);
  const auto mesh = options.mesh ? *options.mesh : default_mesh(params);
  TESSERA_CHECK(ValueError, mesh.defined() && (mesh.ndim() == 1 || mesh.ndim() == 2),
                "fully_shard({}): the mesh is {}, but one axis is needed, or two, replicas and shards; pass the "
                "data-parallel ones, as mesh[\"dp\"]",
                label, mesh);
  const auto plan = agreed_plan(points, params, mesh, options);
  std::shared_ptr<ParamGroup> group;
  if (!plan.params.empty()) {
    group = std::make_shared<ParamGroup>(
        plan.params,
        ParamGroup::Options{.mesh = mesh, .policy = options.mp_policy, .smaller_ranks = plan.smaller_ranks});
  }
  const auto state = std::make_shared<FSDPState>(
      std::move(group), FSDPState::Options{reshards_after_forward(options), options.mp_policy, label});
  state->install(points);
  for (auto* point : points) {
    point->attach(state);
  }
}

void fully_shard(torch::nn::Module& module, FullyShardOptions options) {
  fully_shard(std::vector<torch::nn::Module*>{&module}, std::move(options));
}

}  // namespace tessera
