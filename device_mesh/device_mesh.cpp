#include "device_mesh/device_mesh.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "comm/all_gather_strings.h"
#include "comm/context/rank_context.h"
#include "device_mesh/axis_names.h"
#include "device_mesh/group_grid.h"
#include "device_mesh/mesh_state.h"
#include "device_mesh/rank_agreement.h"

namespace tessera {

namespace {

using detail::MeshState;

const MeshState& checked(const std::shared_ptr<const MeshState>& state) {
  TESSERA_CHECK(StateError, state, "the DeviceMesh is empty; make one by init_device_mesh or from_group");
  return *state;
}

size_t checked_index(const MeshState& state, int64_t axis) {
  const int64_t ndim = state.layout.ndim();
  TESSERA_CHECK(ValueError, axis >= -ndim && axis < ndim, "DeviceMesh: axis {}; a mesh of {} axes has axes 0 to {}",
                axis, ndim, ndim - 1);
  return axis < 0 ? axis + ndim : axis;
}

/// Returns the index of an axis that was not made by flatten.
std::optional<size_t> own_axis(const MeshState& state, std::string_view name) {
  const auto found = std::ranges::find(state.axis_names, name);
  return found == state.axis_names.end() ? std::nullopt : std::optional<size_t>(found - state.axis_names.begin());
}

void check_shape(const std::vector<int64_t>& shape, int64_t count, bool ranks_are_given) {
  TESSERA_CHECK(ValueError, !shape.empty(), "init_device_mesh: the shape has no axes; give at least one size");
  int64_t ranks = 1;
  for (const int64_t size : shape) {
    TESSERA_CHECK(ValueError, size >= 1 && size < (int64_t{1} << 31),
                  "init_device_mesh: shape [{}]; sizes are from 1 to 2^31 - 1", fmt::join(shape, ", "));
    ranks = std::min(ranks * size, int64_t{1} << 31);
  }
  TESSERA_CHECK(ValueError, ranks == count,
                "init_device_mesh: shape [{}] needs {} ranks, but {} {}; choose sizes whose product is {}, or {} {} "
                "ranks",
                fmt::join(shape, ", "), ranks, ranks_are_given ? "the ranks given are" : "the world has", count, count,
                ranks_are_given ? "give" : "start", ranks);
}

/// Checks that `group`, the group of `axis`, supports the device.
void check_backend(const char* caller, const ProcessGroupPtr& group, c10::DeviceType device_type,
                   const std::string& axis) {
  TESSERA_CHECK(ValueError, has_backend(group, device_type),
                "{}: device type {}; the backend \"{}\" of axis {}'s group is not for it; give "
                "ProcessGroupOptions one that is",
                caller, c10::DeviceTypeName(device_type, /*lower_case=*/true), get_backend(group), axis);
}

/// Returns the group of `ranks` in ascending order.
ProcessGroupPtr group_of_given(const std::vector<int64_t>& ranks) {
  std::vector<int64_t> sorted = ranks;
  std::ranges::sort(sorted);
  TESSERA_CHECK(
      ValueError,
      sorted.front() >= 0 && sorted.back() < get_world_size() && std::ranges::adjacent_find(sorted) == sorted.end(),
      "init_device_mesh: ranks [{}]; each of the ranks 0 to {} may be there once", fmt::join(ranks, ", "),
      get_world_size() - 1);
  TESSERA_CHECK(ValueError, std::ranges::binary_search(sorted, get_rank()),
                "init_device_mesh: ranks [{}] are without the caller, rank {}; only they call it",
                fmt::join(ranks, ", "), get_rank());
  return new_group(sorted, "init_device_mesh");
}

std::string describe_mesh(c10::DeviceType device_type, const std::vector<int64_t>& shape,
                          const std::vector<std::string>& axis_names, const std::vector<int64_t>& ranks) {
  return fmt::format("shape [{}], names [{}]{} on {}", fmt::join(shape, ", "), fmt::join(axis_names, ", "),
                     ranks.empty() ? "" : fmt::format(", ranks [{}]", fmt::join(ranks, ", ")),
                     c10::DeviceTypeName(device_type, /*lower_case=*/true));
}

/// Runs `check` on this rank's `arguments`. Ranks with different arguments would make groups that wait for each other,
/// or inconsistent meshes. If `check` throws on one rank, or arguments differ, all ranks of `group` throw.
void check_on_all_ranks(const ProcessGroupPtr& group, const std::string& arguments,
                        const std::function<void()>& check) {
  std::exception_ptr own;
  try {
    check();
  } catch (const ValueError&) {
    own = std::current_exception();
  }
  const auto texts = all_gather_strings(group, arguments);
  if (own) {  // equal arguments have the same error on every rank
    std::rethrow_exception(own);
  }
  const auto other = std::ranges::find_if(texts, [&](const std::string& text) { return text != arguments; });
  TESSERA_CHECK(ValueError, other == texts.end(),
                "init_device_mesh: the ranks' arguments differ: rank {} has {}, rank {} has {}. Give the same ones on "
                "every rank, or the mesh's own ranks: init_device_mesh(device, shape, names, ranks)",
                get_rank(), arguments, group_ranks(group)[static_cast<size_t>(other - texts.begin())], *other);
}

}  // namespace

DeviceMesh init_device_mesh(c10::DeviceType device_type, std::vector<int64_t> shape,
                            std::vector<std::string> axis_names, std::vector<int64_t> ranks) {
  if (!is_initialized()) {
    init_process_group();
  }
  const bool ranks_are_given = !ranks.empty();
  const auto arguments = describe_mesh(device_type, shape, axis_names, ranks);
  ProcessGroupPtr group = ranks_are_given ? group_of_given(ranks) : default_group();
  if (!ranks_are_given) {
    ranks = group_ranks(group);
  }
  std::unique_ptr<detail::MeshRoot> checked_root;
  check_on_all_ranks(group, arguments, [&] {
    check_shape(shape, std::ssize(ranks), ranks_are_given);
    std::vector<std::string> names = checked_axis_names("init_device_mesh", std::move(axis_names), std::ssize(shape));
    TESSERA_CHECK(ValueError, has_backend(default_group(), device_type),
                  "init_device_mesh: device type {}; the default group's backend \"{}\" is not for it",
                  c10::DeviceTypeName(device_type, /*lower_case=*/true), default_group()->getBackendName());
    checked_root = std::make_unique<detail::MeshRoot>(shape, std::move(names), std::move(ranks));
  });
  const std::shared_ptr<detail::MeshRoot> root = std::move(checked_root);
  root->agreed_by = std::move(group);
  for (int64_t axis = 0; axis < root->layout.ndim(); ++axis) {
    root->groups.push_back(detail::group_along(*root, root->layout.axis(axis), root->axis_names[axis]));
  }
  return DeviceMesh(detail::root_state(root, device_type, rank_context_id()));
}

DeviceMesh DeviceMesh::from_group(const std::vector<ProcessGroupPtr>& groups, c10::DeviceType device_type,
                                  std::vector<std::string> axis_names) {
  constexpr const char* kCaller = "DeviceMesh::from_group";
  TESSERA_CHECK(ValueError, !groups.empty(), "{}: no groups; give one for each axis", kCaller);
  std::vector<std::string> names = checked_axis_names(kCaller, std::move(axis_names), std::ssize(groups));
  const std::string device = c10::DeviceTypeName(device_type, /*lower_case=*/true);
  std::vector<int64_t> shape;
  for (size_t axis = 0; axis < groups.size(); ++axis) {
    shape.push_back(get_world_size(groups[axis]));
    check_backend(kCaller, groups[axis], device_type, names[axis]);
  }
  std::vector<int64_t> ranks = ranks_of_groups(groups, fmt::format("{} on {}", fmt::join(names, ", "), device));
  auto root = std::make_shared<detail::MeshRoot>(shape, std::move(names), std::move(ranks));
  root->groups = groups;
  return DeviceMesh(detail::root_state(std::move(root), device_type, rank_context_id()));
}

DeviceMesh DeviceMesh::from_group(const ProcessGroupPtr& group, c10::DeviceType device_type, std::string axis_name) {
  std::vector<std::string> names;
  if (!axis_name.empty()) {
    names.push_back(std::move(axis_name));
  }
  return from_group(std::vector<ProcessGroupPtr>{group}, device_type, std::move(names));
}

DeviceMesh DeviceMesh::root() const {
  const MeshState& state = checked(state_);
  return DeviceMesh(detail::root_state(state.root, state.device_type, state.context_id));
}

DeviceMesh DeviceMesh::with_device_type(c10::DeviceType device_type) const {
  MeshState state = checked(state_);
  for (size_t axis = 0; axis < state.groups.size(); ++axis) {
    check_backend("DeviceMesh::with_device_type", state.groups[axis], device_type, state.axis_names[axis]);
  }
  state.device_type = device_type;
  return DeviceMesh(detail::finish_state(std::move(state)));
}

c10::DeviceType DeviceMesh::device_type() const {
  return checked(state_).device_type;
}

int64_t DeviceMesh::ndim() const {
  return checked(state_).layout.ndim();
}

const std::vector<int64_t>& DeviceMesh::shape() const {
  return checked(state_).shape;
}

const std::vector<std::string>& DeviceMesh::axis_names() const {
  return checked(state_).axis_names;
}

int64_t DeviceMesh::axis_index(std::string_view axis_name) const {
  const MeshState& state = checked(state_);
  const auto own = own_axis(state, axis_name);
  if (!own) {
    throw_unknown_axis(detail::print(state), axis_name, state.axis_names);
  }
  return static_cast<int64_t>(*own);
}

int64_t DeviceMesh::size() const {
  return std::ssize(checked(state_).ranks);
}

int64_t DeviceMesh::size(int64_t axis) const {
  const MeshState& state = checked(state_);
  return state.shape[checked_index(state, axis)];
}

int64_t DeviceMesh::size(std::string_view axis_name) const {
  const MeshState& state = checked(state_);
  const auto own = own_axis(state, axis_name);
  return own ? state.shape[*own] : std::ssize((*this)[axis_name].ranks());
}

const std::vector<int64_t>& DeviceMesh::coordinate() const {
  return checked(state_).coordinate;
}

int64_t DeviceMesh::local_rank(int64_t axis) const {
  const MeshState& state = checked(state_);
  return state.coordinate[checked_index(state, axis)];
}

int64_t DeviceMesh::local_rank(std::string_view axis_name) const {
  const MeshState& state = checked(state_);
  const auto own = own_axis(state, axis_name);
  return own ? state.coordinate[*own] : (*this)[axis_name].local_rank();
}

int64_t DeviceMesh::local_rank() const {
  return checked(state_).local_rank;
}

const std::vector<int64_t>& DeviceMesh::ranks() const {
  return checked(state_).ranks;
}

const ProcessGroupPtr& DeviceMesh::group(int64_t axis) const {
  const MeshState& state = checked(state_);
  return state.groups[checked_index(state, axis)];
}

const ProcessGroupPtr& DeviceMesh::group(std::string_view axis_name) const {
  const MeshState& state = checked(state_);
  const auto own = own_axis(state, axis_name);
  return own ? state.groups[*own] : detail::find_flattened(state, axis_name).group;
}

const ProcessGroupPtr& DeviceMesh::group() const {
  const MeshState& state = checked(state_);
  TESSERA_CHECK(ValueError, state.groups.size() == 1,
                "{}.group() is for meshes of one axis; name an axis, or join them first: mesh.flatten().group()",
                detail::print(state));
  return state.groups[0];
}

DeviceMesh DeviceMesh::operator[](std::string_view axis_name) const {
  return (*this)[std::vector<std::string>{std::string(axis_name)}];
}

DeviceMesh DeviceMesh::operator[](std::initializer_list<const char*> axis_names) const {
  return (*this)[std::vector<std::string>(axis_names.begin(), axis_names.end())];
}

DeviceMesh DeviceMesh::operator[](const std::vector<std::string>& axis_names) const {
  const MeshState& state = checked(state_);
  return axis_names == state.axis_names ? *this
                                        : DeviceMesh(detail::sub_mesh(state, detail::find_axes(state, axis_names)));
}

DeviceMesh DeviceMesh::flatten(const std::vector<std::string>& axis_names, std::string name) const {
  const MeshState& state = checked(state_);
  const auto& names = axis_names.empty() ? state.axis_names : axis_names;
  std::vector<detail::NamedAxis> axes;
  detail::NamedAxis joined;
  std::exception_ptr failure;
  try {
    axes = detail::find_axes(state, names);
    joined = detail::joined_axis(state, axes, std::move(name));
  } catch (const Error&) {
    failure = std::current_exception();
  }
  if (failure || !joined.group) {
    // Ranks that join different axes would make groups that wait for each other.
    check_ranks_agree({root()}, "DeviceMesh::flatten", [&] {
      if (failure) {
        std::rethrow_exception(failure);
      }
      return std::vector<std::string>{fmt::format("axes [{}] as \"{}\"", fmt::join(names, ", "), joined.name)};
    });
    detail::register_axis(state, axes, joined);
  }
  return DeviceMesh(detail::sub_mesh(state, {std::move(joined)}));
}

bool DeviceMesh::operator==(const DeviceMesh& other) const {
  if (state_ == other.state_) {
    return true;
  }
  return state_ && other.state_ && state_->hash == other.state_->hash &&
         state_->context_id == other.state_->context_id && state_->device_type == other.state_->device_type &&
         state_->ranks == other.state_->ranks && state_->shape == other.state_->shape &&
         state_->axis_names == other.state_->axis_names;
}

bool DeviceMesh::shares_root_with(const DeviceMesh& other) const {
  return state_ == other.state_ || (state_ && other.state_ && state_->root == other.state_->root);
}

bool DeviceMesh::shares_groups_with(const DeviceMesh& other) const {
  return state_ == other.state_ || (state_ && other.state_ && state_->groups == other.state_->groups);
}

std::string DeviceMesh::to_string() const {
  return state_ ? detail::print(*state_) : "DeviceMesh(empty)";
}

uint64_t DeviceMesh::hash() const {
  return state_ ? state_->hash : 0;
}

uint64_t DeviceMesh::groups_hash() const {
  uint64_t hash = state_ ? reinterpret_cast<uintptr_t>(state_->root.get()) : 0;
  for (int64_t axis = 0; state_ && axis < ndim(); ++axis) {
    hash = hash_combine(hash, reinterpret_cast<uintptr_t>(group(axis).get()));
  }
  return hash;
}

}  // namespace tessera

fmt::format_context::iterator fmt::formatter<tessera::DeviceMesh>::format(const tessera::DeviceMesh& mesh,
                                                                          fmt::format_context& context) const {
  return fmt::formatter<std::string_view>::format(mesh.to_string(), context);
}
