#include "device_mesh/mesh_state.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "device_mesh/axis_names.h"

namespace tessera::detail {

namespace {

uint64_t hash_text(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  }
  return hash;
}

uint64_t compute_hash(const MeshState& state) {
  uint64_t hash = hash_combine(static_cast<uint64_t>(state.device_type), state.context_id);
  for (size_t axis = 0; axis < state.shape.size(); ++axis) {
    hash = hash_combine(hash_combine(hash, state.shape[axis]), hash_text(state.axis_names[axis]));
  }
  for (const int64_t rank : state.ranks) {
    hash = hash_combine(hash, rank);
  }
  return hash;
}

int64_t place_of_this_rank(const MeshRoot& root) {
  return std::ranges::find(root.ranks, get_rank()) - root.ranks.begin();
}

// Returns whether an axis lies within a mesh, so that the mesh's coordinates determine it.
bool contains(const MeshState& state, const AxisLayout& axis) {
  const std::vector<int64_t> along = ranks_through(*state.root, MeshLayout({axis}));
  return std::ranges::all_of(along,
                             [&](int64_t rank) { return std::ranges::find(state.ranks, rank) != state.ranks.end(); });
}

NamedAxis find_axis(const MeshState& state, std::string_view name) {
  const auto own = std::ranges::find(state.axis_names, name);
  if (own != state.axis_names.end()) {
    const size_t index = own - state.axis_names.begin();
    return {*own, state.layout.axis(index), state.groups[index]};
  }
  const auto& axis = find_flattened(state, name);
  return {std::string(name), axis.layout, axis.group};
}

}  // namespace

const MeshRoot::FlattenedAxis& find_flattened(const MeshState& state, std::string_view name) {
  std::vector<std::string> known = state.axis_names;
  std::lock_guard lock(state.root->mutex);
  for (const auto& [flattened, axis] : state.root->flattened) {
    if (contains(state, axis.layout)) {
      if (flattened == name) {
        return axis;
      }
      known.push_back(flattened);
    }
  }
  throw_unknown_axis(print(state), name, known);
}

std::shared_ptr<const MeshState> finish_state(MeshState state) {
  state.shape = state.layout.shape();
  state.coordinate = state.layout.coordinate(place_of_this_rank(*state.root));
  state.ranks = ranks_through(*state.root, state.layout);
  state.local_rank = std::ranges::find(state.ranks, get_rank()) - state.ranks.begin();
  state.hash = compute_hash(state);
  return std::make_shared<const MeshState>(std::move(state));
}

std::vector<int64_t> ranks_through(const MeshRoot& root, const MeshLayout& layout) {
  return ranks_along(layout, place_of_this_rank(root), root.ranks);
}

ProcessGroupPtr group_along(const MeshRoot& root, const AxisLayout& axis, const std::string& name) {
  const std::vector<int64_t> ranks = ranks_through(root, MeshLayout({axis}));
  return ranks == group_ranks(default_group()) ? default_group() : new_group(ranks, name);
}

std::string print(const MeshState& state) {
  std::vector<std::string> axes;
  for (size_t axis = 0; axis < state.axis_names.size(); ++axis) {
    axes.push_back(fmt::format("{}: {}", state.axis_names[axis], state.shape[axis]));
  }
  return fmt::format("DeviceMesh({}, {{{}}})", c10::DeviceTypeName(state.device_type, /*lower_case=*/true),
                     fmt::join(axes, ", "));
}

std::vector<NamedAxis> find_axes(const MeshState& state, const std::vector<std::string>& names) {
  TESSERA_CHECK(ValueError, !names.empty(), "{}: no axis names; give at least one", print(state));
  std::vector<NamedAxis> axes;
  for (const std::string& name : names) {
    axes.push_back(find_axis(state, name));
    for (size_t i = 0; i + 1 < axes.size(); ++i) {
      TESSERA_CHECK(ValueError, axes[i].name != name && !axes_overlap(axes[i].layout, axes.back().layout),
                    "{}: axes \"{}\" and \"{}\" share ranks' coordinates; each axis may be used once", print(state),
                    axes[i].name, name);
    }
  }
  return axes;
}

std::shared_ptr<const MeshState> root_state(std::shared_ptr<MeshRoot> root, c10::DeviceType device_type,
                                            uint64_t context_id) {
  return finish_state({.root = root,
                       .device_type = device_type,
                       .layout = root->layout,
                       .axis_names = root->axis_names,
                       .groups = root->groups,
                       .context_id = context_id,
                       .shape = {},
                       .coordinate = {},
                       .ranks = {},
                       .local_rank = 0,
                       .hash = 0});
}

std::shared_ptr<const MeshState> sub_mesh(const MeshState& parent, const std::vector<NamedAxis>& axes) {
  std::vector<AxisLayout> layouts;
  std::vector<std::string> names;
  std::vector<ProcessGroupPtr> groups;
  for (const NamedAxis& axis : axes) {
    layouts.push_back(axis.layout);
    names.push_back(axis.name);
    groups.push_back(axis.group);
  }
  return finish_state({.root = parent.root,
                       .device_type = parent.device_type,
                       .layout = MeshLayout(std::move(layouts)),
                       .axis_names = std::move(names),
                       .groups = std::move(groups),
                       .context_id = parent.context_id,
                       .shape = {},
                       .coordinate = {},
                       .ranks = {},
                       .local_rank = 0,
                       .hash = 0});
}

NamedAxis joined_axis(const MeshState& state, const std::vector<NamedAxis>& axes, std::string name) {
  std::vector<AxisLayout> layouts;
  std::vector<std::string> names;
  for (const NamedAxis& axis : axes) {
    layouts.push_back(axis.layout);
    names.push_back(axis.name);
  }
  if (name.empty()) {
    name = fmt::format("{}", fmt::join(names, "_"));
  }
  NamedAxis joined = {name, join_axes(layouts), {}};
  // A name denotes the same axis in all meshes of a root, even in those that lack the axis.
  MeshRoot& root = *state.root;
  const auto own = std::ranges::find(root.axis_names, name);
  std::lock_guard lock(root.mutex);
  const auto known = root.flattened.find(name);
  if (own != root.axis_names.end() || known != root.flattened.end()) {
    const size_t index = own - root.axis_names.begin();
    const bool is_own = own != root.axis_names.end();
    TESSERA_CHECK(ValueError, (is_own ? root.layout.axis(index) : known->second.layout) == joined.layout,
                  "{}.flatten([{}], \"{}\"): the name is another axis already; choose a new one", print(state),
                  fmt::join(names, ", "), name);
    joined.group = is_own ? root.groups[index] : known->second.group;
  }
  return joined;
}

void register_axis(const MeshState& state, const std::vector<NamedAxis>& axes, NamedAxis& joined) {
  joined.group = axes.size() == 1 ? axes[0].group : group_along(*state.root, joined.layout, joined.name);
  std::lock_guard lock(state.root->mutex);
  state.root->flattened.emplace(joined.name, MeshRoot::FlattenedAxis{joined.layout, joined.group});
}

}  // namespace tessera::detail
