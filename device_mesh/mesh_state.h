#pragma once
// What a DeviceMesh points to, and how sub-meshes are found; internal to this package.

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "comm/process_group.h"
#include "device_mesh/mesh_layout.h"

namespace tessera::detail {

/// What a mesh and its sub-meshes share: its own axes, and those that were made by flatten.
struct MeshRoot {
  struct FlattenedAxis {
    AxisLayout layout;
    ProcessGroupPtr group;
  };

  MeshRoot(const std::vector<int64_t>& shape, std::vector<std::string> names, std::vector<int64_t> rank_at)
      : layout(MeshLayout::row_major(shape)), axis_names(std::move(names)), ranks(std::move(rank_at)) {}

  /// Of places 0 to n - 1.
  const MeshLayout layout;
  const std::vector<std::string> axis_names;
  /// Which rank of the default group is at each place.
  const std::vector<int64_t> ranks;
  std::vector<ProcessGroupPtr> groups;

  std::mutex mutex;
  std::map<std::string, FlattenedAxis, std::less<>> flattened;
};

struct MeshState {
  std::shared_ptr<MeshRoot> root;
  c10::DeviceType device_type;
  MeshLayout layout;
  std::vector<std::string> axis_names;
  std::vector<ProcessGroupPtr> groups;
  uint64_t context_id;
  // Derived from the above and this rank.
  std::vector<int64_t> shape;
  std::vector<int64_t> coordinate;
  std::vector<int64_t> ranks;
  int64_t local_rank;
  uint64_t hash;
};

/// An axis of a mesh by name, its own or one made by flatten.
struct NamedAxis {
  std::string name;
  AxisLayout layout;
  ProcessGroupPtr group;
};

/// Fills in what follows from the rest and from this rank.
std::shared_ptr<const MeshState> finish_state(MeshState state);

/// The ranks that differ from this one along the axes of `layout` only, row-major.
std::vector<int64_t> ranks_through(const MeshRoot& root, const MeshLayout& layout);

/// The group of this rank's neighbours along the axis; the default group where they are all ranks in order.
ProcessGroupPtr group_along(const MeshRoot& root, const AxisLayout& axis, const std::string& name);

/// The mesh with all of the root's own axes.
std::shared_ptr<const MeshState> root_state(std::shared_ptr<MeshRoot> root, c10::DeviceType device_type,
                                            uint64_t context_id);

std::string print(const MeshState& state);

/// The axis made by flatten, which stays where it is. Throws KeyError for any other name.
const MeshRoot::FlattenedAxis& find_flattened(const MeshState& state, std::string_view name);

/// Throws KeyError for a name that is unknown, ValueError for none or for axes that overlap.
std::vector<NamedAxis> find_axes(const MeshState& state, const std::vector<std::string>& names);

std::shared_ptr<const MeshState> sub_mesh(const MeshState& parent, const std::vector<NamedAxis>& axes);

/// `axes` as one axis, which is registered with the mesh's root as `name` ("": the joined names).
NamedAxis flatten_axes(const MeshState& state, const std::vector<NamedAxis>& axes, std::string name);

}  // namespace tessera::detail
