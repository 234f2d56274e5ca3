#pragma once
// The state behind a DeviceMesh, and lookup of sub-meshes; internal to this package.

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

/// State shared by a mesh and its sub-meshes: own axes, and those made by flatten().
struct MeshRoot {
  struct FlattenedAxis {
    AxisLayout layout;
    ProcessGroupPtr group;
  };

  MeshRoot(const std::vector<int64_t>& shape, std::vector<std::string> names, std::vector<int64_t> rank_at)
      : layout(MeshLayout::row_major(shape)), axis_names(std::move(names)), ranks(std::move(rank_at)) {}

  const MeshLayout layout;  // of places 0 to n - 1
  const std::vector<std::string> axis_names;
  const std::vector<int64_t> ranks;  // rank in the default group at each place
  std::vector<ProcessGroupPtr> groups;
  ProcessGroupPtr agreed_by;  // all ranks, of a mesh over some of the world's

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

/// Axis of a mesh, either its own or made by flatten().
struct NamedAxis {
  std::string name;
  AxisLayout layout;
  ProcessGroupPtr group;
};

std::shared_ptr<const MeshState> finish_state(MeshState state);  // computes the derived fields

/// Returns the ranks that differ from this one only along the axes of `layout`, row-major.
std::vector<int64_t> ranks_through(const MeshRoot& root, const MeshLayout& layout);

/// Returns the group of this rank's neighbors along the axis; the default group if these are all ranks in order.
ProcessGroupPtr group_along(const MeshRoot& root, const AxisLayout& axis, const std::string& name);

/// Returns the mesh with all of the root's own axes.
std::shared_ptr<const MeshState> root_state(std::shared_ptr<MeshRoot> root, c10::DeviceType device_type,
                                            uint64_t context_id);

std::string print(const MeshState& state);

/// Returns an axis made by flatten(), with a stable address. Throws KeyError for any other name.
const MeshRoot::FlattenedAxis& find_flattened(const MeshState& state, std::string_view name);

/// Throws KeyError for an unknown name, and ValueError for no names or overlapping axes.
std::vector<NamedAxis> find_axes(const MeshState& state, const std::vector<std::string>& names);

std::shared_ptr<const MeshState> sub_mesh(const MeshState& parent, const std::vector<NamedAxis>& axes);

/// Returns `axes` joined as `name` ("": the joined names), without a group if the root does not have it yet. Throws
/// ValueError if another axis has the name.
NamedAxis joined_axis(const MeshState& state, const std::vector<NamedAxis>& axes, std::string name);

/// Gives `joined`, which joins `axes`, a group, and registers it with the root.
void register_axis(const MeshState& state, const std::vector<NamedAxis>& axes, NamedAxis& joined);

}  // namespace tessera::detail
