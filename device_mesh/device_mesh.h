#pragma once
// A named grid of ranks, with a process group for each of its axes.
//
//   DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 3}, {"dp", "tp"});   // 6 ranks, last axis fastest
//
//              tp=0 tp=1 tp=2        on rank 4:
//        dp=0    0    1    2           mesh.coordinate()     = {1, 1}
//        dp=1    3    4    5           mesh["tp"].ranks()    = {3, 4, 5}, mesh["dp"].ranks() = {1, 4}
//                                      mesh.local_rank("tp") = 1
//   mesh.flatten({"dp", "tp"}, "world");     mesh["world"].ranks() = {0, 1, 2, 3, 4, 5}
//
// A sub-mesh is the part of the mesh that the calling rank is in, and shares the groups of its mesh.
// After torch.distributed.device_mesh; unlike there, slices may list axes in any order.

#include <c10/core/DeviceType.h>
#include <fmt/format.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/process_group.h"

namespace tessera {

namespace detail {
struct MeshState;
}

/// A cheap value over shared, immutable state. A default-constructed one is empty: only ==, hash(), defined() and
/// formatting are allowed. Accessors return references into the state, valid while any copy of the mesh lives, and
/// those by axis index do not allocate or count references. Thread safety: any number of threads may read; flatten is
/// for one thread of a rank. Errors: KeyError for an unknown axis name (lists the axes and the closest), ValueError
/// for an index out of range (negative indices count from the end).
class DeviceMesh {
 public:
  DeviceMesh() = default;
  bool defined() const { return state_ != nullptr; }

  c10::DeviceType device_type() const;
  int64_t ndim() const;
  /// Sizes of the axes.
  const std::vector<int64_t>& shape() const;
  /// As given; without names they are "axis_0", "axis_1", ...
  const std::vector<std::string>& axis_names() const;
  /// The place of `axis_name` among the axes.
  int64_t axis_index(std::string_view axis_name) const;

  /// Number of ranks in all, or along one axis.
  int64_t size() const;
  int64_t size(int64_t axis) const;
  int64_t size(std::string_view axis_name) const;

  /// This rank's place along each axis, or along one.
  const std::vector<int64_t>& coordinate() const;
  int64_t local_rank(int64_t axis) const;
  int64_t local_rank(std::string_view axis_name) const;
  /// This rank's place in ranks().
  int64_t local_rank() const;

  /// All ranks of the mesh as ranks of the default group, row-major.
  const std::vector<int64_t>& ranks() const;

  /// The group of the ranks that differ from this one along the axis only.
  const ProcessGroupPtr& group(int64_t axis) const;
  const ProcessGroupPtr& group(std::string_view axis_name) const;
  /// The group of a 1-D mesh. Throws ValueError for more axes: flatten them first.
  const ProcessGroupPtr& group() const;

  /// The sub-mesh over the named axes, in this order; names made by flatten are allowed.
  DeviceMesh operator[](std::string_view axis_name) const;
  DeviceMesh operator[](const std::vector<std::string>& axis_names) const;
  DeviceMesh operator[](std::initializer_list<const char*> axis_names) const;

  /// Joins axes (none given: all) into one, with a group of its own, and returns it as a 1-D mesh; mesh[name] finds it
  /// afterwards. `name` defaults to the joined names, "dp_tp". Every rank of the whole mesh calls it. The same call
  /// again returns the same. Throws ValueError if the name means something else already.
  DeviceMesh flatten(const std::vector<std::string>& axis_names = {}, std::string name = "") const;

  /// The mesh from init_device_mesh that this one is a part of; an equal mesh if it is that one.
  DeviceMesh root() const;

  /// Same ranks, shape, names, device type, and the same rank context (comm/rank_context.h): meshes of two ranks that
  /// are threads of one process are never equal.
  bool operator==(const DeviceMesh& other) const;
  /// Whether collectives on both go through the same groups: copies and equal parts of one mesh do, equal meshes of two
  /// init_device_mesh calls do not.
  bool shares_groups_with(const DeviceMesh& other) const;
  /// Equal meshes have equal hashes; stable over runs for ranks that are processes.
  uint64_t hash() const;
  /// "DeviceMesh(cpu, {dp: 2, tp: 3})", as fmt prints it.
  std::string to_string() const;

 private:
  friend DeviceMesh init_device_mesh(c10::DeviceType, std::vector<int64_t>, std::vector<std::string>);
  explicit DeviceMesh(std::shared_ptr<const detail::MeshState> state) : state_(std::move(state)) {}

  std::shared_ptr<const detail::MeshState> state_;
};

/// A mesh over all ranks of the default group, with a group for each axis. Every rank calls it with the same arguments.
/// Sets up the default group from the environment if there is none. Throws ValueError if the product of `shape` is not
/// the number of ranks, for an axis without ranks, and for names that are too few, too many, empty or doubled.
DeviceMesh init_device_mesh(c10::DeviceType device_type, std::vector<int64_t> shape,
                            std::vector<std::string> axis_names = {});

}  // namespace tessera

template <>
struct fmt::formatter<tessera::DeviceMesh> : fmt::formatter<std::string_view> {
  fmt::format_context::iterator format(const tessera::DeviceMesh& mesh, fmt::format_context& context) const;
};
