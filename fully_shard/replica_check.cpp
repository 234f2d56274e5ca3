#include "fully_shard/replica_check.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <string>
#include <unordered_set>

#include "base/error.h"
#include "fully_shard/fsdp_root.h"
#include "fully_shard/rank_agreement.h"
#include "fully_shard/unit_recipe.h"

namespace tessera {

namespace {

/// Parameters that are replicated along one axis of `mesh`, the largest on which one of them lies: tensor parallelism's
/// axes are part of it, whose ranks run the same units.
struct Replicas {
  DeviceMesh data_parallel;
  std::string axis;
  DeviceMesh mesh;
  std::vector<std::string> names;
  std::vector<std::string> values;  // a text each: equal where the values are
};

std::string digest_of(const at::Tensor& local) {
  const auto bytes = local.detach().cpu().contiguous();
  return fmt::format("{:016x}", XXH3_64bits(bytes.const_data_ptr(), bytes.nbytes()));
}

bool has_replicas(const ParamGroup& group) {
  return group.axes().num_replicas() > 1;
}

void add(const std::string& unit, const ParamGroup& group, std::vector<Replicas>& all) {
  const auto& axes = group.axes();
  auto found = std::ranges::find_if(all, [&](const auto& other) { return other.data_parallel == axes.mesh; });
  if (found == all.end()) {
    const auto& name = axes.mesh.axis_names()[static_cast<size_t>(*axes.replica_axis)];
    found =
        all.insert(all.end(), {.data_parallel = axes.mesh, .axis = name, .mesh = axes.mesh, .names = {}, .values = {}});
  }
  for (const auto& param : group.params()) {
    const auto& mesh = param.spec()->mesh();
    found->mesh = mesh.ndim() > found->mesh.ndim() ? mesh : found->mesh;
    found->names.push_back(fmt::format("'{}' of {}", param.origin().name, unit));
    found->values.push_back(digest_of(param.shard()));
  }
}

/// The place in mesh.ranks() of the rank that has the first replica of what number `index` has.
size_t first_replica(const DeviceMesh& mesh, int64_t axis, size_t index) {
  size_t stride = 1;
  for (int64_t inner = mesh.ndim() - 1; inner > axis; --inner) {
    stride *= static_cast<size_t>(mesh.size(inner));
  }
  const size_t coordinate = index / stride % static_cast<size_t>(mesh.size(axis));
  return index - coordinate * stride;
}

/// A unit of a module above has it, or one below.
bool is_in_unit(const at::Tensor& param, const std::unordered_set<const c10::TensorImpl*>& known) {
  const auto* meta = dtensor_meta(param);
  return (meta && meta->origin) || known.contains(param.unsafeGetTensorImpl());
}

void check_none_is_left(torch::nn::Module& module, const std::vector<NamedState>& states,
                        const std::vector<at::Tensor>& ignored_params) {
  std::unordered_set<const c10::TensorImpl*> known;
  const auto add_all = [&](const std::vector<at::Tensor>& params) {
    for (const auto& param : params) {
      known.insert(param.unsafeGetTensorImpl());
    }
  };
  add_all(ignored_params);
  for (const auto& below : module.modules()) {
    const auto* point = find_hook_point(*below);
    if (const auto recipe = point ? point->find<UnitRecipe>() : nullptr) {
      add_all(recipe->request.options.ignored_params);
    }
  }
  for (const auto& [path, state] : states) {
    if (const auto& group = state->group()) {
      for (const auto& param : group->params()) {
        known.insert(param.param().unsafeGetTensorImpl());
      }
    }
  }
  for (const auto& item : module.named_parameters()) {
    TESSERA_CHECK(
        StateError, !item.value().requires_grad() || is_in_unit(item.value(), known),
        "check_replicas: parameter '{}' requires a gradient, but is in no unit, so that it trains on this "
        "rank's gradients alone. Call {} on the module that holds it, as on the whole model, last; or, if the "
        "program reduces its gradients by itself, name it in ignored_params",
        item.key(), states.at(0).state->api());
  }
}

void check(const Replicas& replicas) {
  std::string own;
  for (const auto& value : replicas.values) {
    own += value;
  }
  const size_t width = replicas.values.empty() ? 1 : replicas.values[0].size();
  const auto texts = gather_texts(replicas.mesh, own);
  const int64_t axis = replicas.mesh.axis_index(replicas.axis);
  for (size_t i = 0; i < texts.size(); ++i) {
    const size_t first = first_replica(replicas.mesh, axis, i);
    const auto differs = std::ranges::mismatch(texts[i], texts[first]).in1 - texts[i].begin();
    const size_t param = static_cast<size_t>(differs) / width;
    TESSERA_CHECK(ValueError, param >= replicas.names.size(),
                  "check_replicas: parameter {} has other values on rank {} than on rank {}. Build the model from the "
                  "same seed on all ranks (torch::manual_seed before it), or give all the same state, such as rank 0's "
                  "with dcp::set_model_state_dict and broadcast_from_rank0",
                  replicas.names[param], replicas.mesh.ranks()[i], replicas.mesh.ranks()[first]);
  }
}

}  // namespace

void check_replicas(ModuleRef module, const std::vector<at::Tensor>& ignored_params) {
  const auto states = fsdp_states(*module);
  TESSERA_CHECK(StateError, !states.empty(), "check_replicas: neither {} nor a module below it is a unit",
                module->name());
  check_none_is_left(*module, states, ignored_params);
  std::vector<Replicas> all;
  for (const auto& [path, state] : states) {
    if (const auto& group = state->group()) {
      TESSERA_CHECK(StateError, !group->is_on_meta(),
                    "check_replicas: the parameters of {} have no memory yet; call to_empty and give them values",
                    path);
      if (has_replicas(*group)) {
        add(path, *group, all);
      }
    }
  }
  for (const auto& replicas : all) {
    check(replicas);
  }
}

}  // namespace tessera
