#include "fully_shard/replica_check.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "device_mesh/rank_agreement.h"
#include "fully_shard/autograd/backward_hooks.h"
#include "fully_shard/engine/fsdp_root.h"
#include "fully_shard/make_unit.h"
#include "nn/hooks/hook_point.h"

namespace tessera {

namespace {

/// Parameter to compare.
struct Held {
  std::string name;
  at::Tensor param;
  at::Tensor local;
  std::optional<DeviceMesh> data_parallel;  // mesh of its unit
  SpecPtr spec = nullptr;                   // null: plain, and in no unit
};

/// Parameter that is replicated over some ranks of a mesh.
struct Copied {
  std::string name;
  std::string digest;
  std::vector<int64_t> axes;  // axes of the mesh along which it is replicated
  bool beyond_data_parallel;  // whether one of them is outside its unit's mesh
};

std::string compute_digest(const at::Tensor& local) {
  const auto bytes = local.detach().cpu().contiguous();
  return fmt::format("{:016x}", XXH3_64bits(bytes.const_data_ptr(), bytes.nbytes()));
}

bool has_axis(const DeviceMesh& mesh, const std::string& name) {
  return std::ranges::find(mesh.axis_names(), name) != mesh.axis_names().end();
}

bool contains(const DeviceMesh& mesh, const DeviceMesh& part) {
  return mesh.root() == part.root() &&
         std::ranges::all_of(part.axis_names(), [&](const auto& name) { return has_axis(mesh, name); });
}

/// Returns the parameters' meshes for units with this data-parallel mesh (or none), without meshes contained in others.
std::vector<DeviceMesh> widest_meshes(const std::vector<Held>& all, const std::optional<DeviceMesh>& data_parallel) {
  std::vector<DeviceMesh> meshes;
  for (const auto& held : all) {
    const auto is_known = [&](const auto& mesh) { return contains(mesh, held.spec->mesh()); };
    if (held.data_parallel == data_parallel && held.spec && std::ranges::none_of(meshes, is_known)) {
      std::erase_if(meshes, [&](const auto& mesh) { return contains(held.spec->mesh(), mesh); });
      meshes.push_back(held.spec->mesh());
    }
  }
  return meshes;
}

/// Returns the parameters that the ranks of `mesh` must compare.
std::vector<Copied> copies_on(const DeviceMesh& mesh, const std::vector<Held>& all,
                              const std::optional<DeviceMesh>& data_parallel) {
  std::vector<Copied> copies;
  for (const auto& held : all) {
    if (held.data_parallel != data_parallel || (held.spec && !contains(mesh, held.spec->mesh()))) {
      continue;
    }
    Copied copied{.name = held.name, .digest = {}, .axes = {}, .beyond_data_parallel = false};
    for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
      const auto& name = mesh.axis_names()[static_cast<size_t>(axis)];
      const bool lies_there = held.spec && has_axis(held.spec->mesh(), name);
      const bool is_copied =
          !lies_there ||
          held.spec->placements()[static_cast<size_t>(held.spec->mesh().axis_index(name))].is_replicate();
      if (mesh.size(axis) > 1 && is_copied) {
        copied.axes.push_back(axis);
        copied.beyond_data_parallel |= !data_parallel || !has_axis(*data_parallel, name);
      }
    }
    if (!copied.axes.empty()) {
      copied.digest = compute_digest(held.local);
      copies.push_back(std::move(copied));
    }
  }
  return copies;
}

/// Returns the index in mesh.ranks() of the rank with the first copy of the data of rank `index`.
size_t first_copy(const DeviceMesh& mesh, const std::vector<int64_t>& axes, size_t index) {
  for (const int64_t axis : axes) {
    size_t stride = 1;
    for (int64_t inner = mesh.ndim() - 1; inner > axis; --inner) {
      stride *= static_cast<size_t>(mesh.size(inner));
    }
    index -= index / stride % static_cast<size_t>(mesh.size(axis)) * stride;
  }
  return index;
}

void check_none_is_left(torch::nn::Module& module, const std::string& api,
                        const std::vector<at::Tensor>& ignored_params) {
  std::unordered_set<const c10::TensorImpl*> ignored;
  const auto add_all = [&](const std::vector<at::Tensor>& params) {
    for (const auto& param : params) {
      ignored.insert(param.unsafeGetTensorImpl());
    }
  };
  add_all(ignored_params);
  for (const auto& below : module.modules()) {
    const auto* point = find_hook_point(*below);
    if (const auto recipe = point ? point->find<UnitRecipe>() : nullptr) {
      add_all(recipe->request.options.ignored_params);
    }
  }
  for (const auto& item : module.named_parameters()) {
    const auto& param = item.value();
    TESSERA_CHECK(
        StateError, !param.requires_grad() || find_owner(param) || ignored.contains(param.unsafeGetTensorImpl()),
        "check_replicas: parameter '{}' requires a gradient, but is in no unit, so that it trains on this "
        "rank's gradients alone. Call {} on the module that holds it, as on the whole model, last; or, if the "
        "program reduces its gradients by itself, name it in ignored_params",
        item.key(), api);
  }
}

void compare(const DeviceMesh& mesh, const std::vector<Copied>& copies) {
  std::string own;
  for (const auto& copied : copies) {
    own += copied.digest;
  }
  const auto texts = all_gather_strings(mesh, own);
  const size_t width = copies[0].digest.size();
  for (size_t i = 0; i < texts.size(); ++i) {
    TESSERA_CHECK(
        ValueError, texts[i].size() == texts[0].size(),
        "check_replicas: rank {} has {} parameters to compare, rank {} has {}; all ranks call it for the same "
        "module",
        mesh.ranks()[0], texts[0].size() / width, mesh.ranks()[i], texts[i].size() / width);
  }
  for (size_t param = 0; param < copies.size(); ++param) {
    const auto digest = [&](size_t i) { return std::string_view(texts[i]).substr(param * width, width); };
    for (size_t i = 0; i < texts.size(); ++i) {
      const size_t first = first_copy(mesh, copies[param].axes, i);
      TESSERA_CHECK(
          ValueError, digest(i) == digest(first),
          "check_replicas: parameter {} has other values on rank {} than on rank {}. Build the model from the same "
          "seed on all ranks (torch::manual_seed before it), or give all the same state, such as rank 0's with "
          "dcp::set_model_state_dict and broadcast_from_rank0{}",
          copies[param].name, mesh.ranks()[i], mesh.ranks()[first],
          copies[param].beyond_data_parallel ? "; or, if it is to differ, name it in ignored_params" : "");
    }
  }
}

std::vector<Held> held_by_units(const std::vector<NamedState>& states) {
  std::vector<Held> all;
  for (const auto& [path, state] : states) {
    if (const auto& group = state->group()) {
      TESSERA_CHECK(StateError, !group->unit_params().is_on_meta(),
                    "check_replicas: the parameters of {} have no memory yet; call to_empty and give them values",
                    path);
      for (const auto& param : group->params()) {
        all.push_back({.name = fmt::format("'{}' of {}", param.origin().name, path),
                       .param = param.param(),
                       .local = param.shard(),
                       .data_parallel = group->context().axes.mesh,
                       .spec = param.spec()});
      }
    }
  }
  return all;
}

/// Returns whether no unit, not even one of a module above, owns the parameters, and some of them are DTensors.
bool is_tensor_parallel_alone(const torch::nn::Module& module) {
  bool has_dtensors = false;
  for (const auto& param : module.parameters()) {
    const auto* meta = dtensor_meta(param);
    if (meta && meta->origin) {
      return false;
    }
    has_dtensors = has_dtensors || meta;
  }
  return has_dtensors;
}

/// Returns the parameters of a model with tensor parallelism only.
std::vector<Held> held_by(torch::nn::Module& module) {
  std::vector<Held> all;
  for (const auto& item : module.named_parameters()) {
    const auto& param = item.value();
    const auto* meta = dtensor_meta(param);
    const auto& local = meta ? meta->local : param;
    TESSERA_CHECK(StateError, !local.is_meta(),
                  "check_replicas: parameter '{}' has no memory yet; call to_empty and give it values", item.key());
    all.push_back({.name = fmt::format("'{}'", item.key()),
                   .param = param,
                   .local = local,
                   .data_parallel = std::nullopt,
                   .spec = meta ? meta->spec : nullptr});
  }
  return all;
}

}  // namespace

void check_replicas(ModuleRef module, const std::vector<at::Tensor>& ignored_params) {
  const auto states = fsdp_states(*module);
  TESSERA_CHECK(StateError, !states.empty() || is_tensor_parallel_alone(*module),
                "check_replicas: neither {} nor a module below it is a unit, and no parameter is a DTensor",
                module_type_name(*module));
  if (!states.empty()) {
    check_none_is_left(*module, states[0].state->api(), ignored_params);
  }
  auto all = states.empty() ? held_by(*module) : held_by_units(states);
  std::erase_if(all, [&](const Held& held) {
    return std::ranges::any_of(ignored_params, [&](const auto& param) { return param.is_same(held.param); });
  });
  std::vector<std::optional<DeviceMesh>> done;
  for (const auto& held : all) {
    if (std::ranges::find(done, held.data_parallel) == done.end()) {
      done.push_back(held.data_parallel);
      for (const auto& mesh : widest_meshes(all, held.data_parallel)) {
        if (const auto copies = copies_on(mesh, all, held.data_parallel); !copies.empty()) {
          compare(mesh, copies);
        }
      }
    }
  }
}

}  // namespace tessera
