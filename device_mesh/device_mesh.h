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
//
// A mesh need not have all ranks, nor make its groups. These two are over ranks 4 to 7 and called by them alone; the
// second one takes groups that the program has already:
//
//   init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"}, {4, 5, 6, 7});
//   DeviceMesh::from_group({dp_group, tp_group}, at::kCPU, {"dp", "tp"});
//
// On the other ranks there is no mesh. What is over the default group, such as dcp::save() and ShardedGradScaler, is
// still for all ranks.
//
// After torch.distributed.device_mesh; unlike there, slices may list axes in any order.

#include <c10/core/DeviceType.h>
#include <fmt/format.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "comm/process_group.h"

// Before C++23, mesh["dp", "tp"] is mesh["tp"]: the comma is an operator, and what is left of it is thrown away. No
// overload sees that, so a comma within [] is an error in every source that includes this header.
#if !defined(__cpp_multidimensional_subscript)
#if defined(__clang__)
#pragma clang diagnostic error "-Wdeprecated-comma-subscript"
#elif defined(__GNUC__)
#pragma GCC diagnostic error "-Wcomma-subscript"
#endif
#endif

namespace tessera {

namespace detail {
struct MeshState;
}

/// A cheap value over shared, immutable state, which owns a reference to each of its groups. A default-constructed one
/// is empty: only ==, hashes, defined() and formatting are allowed. Accessors return references into the state, valid
/// while any copy of the mesh lives, and those by axis index do not allocate or count references. Thread safety: any
/// number of threads may read; flatten is for one thread of a rank. Errors: KeyError for an unknown axis name (lists
/// the axes and the closest), ValueError for an index out of range (negative indices count from the end).
class DeviceMesh {
 public:
  DeviceMesh() = default;
  bool defined() const { return state_ != nullptr; }

  /// A mesh over groups that the program has: of new_group(), or c10d's own by adopt_group() (comm/adopted_group.h).
  /// groups[i] is this rank's group along axis i, and they must be the axes of one grid, as those of
  /// init_device_mesh() are; the grid's ranks and their order follow from the groups'. The mesh makes no group, but for
  /// flatten(), and does not end those that it was given, which must last as long as it is used. Collective over the
  /// groups, one after the other from the last axis to the first: each rank of the grid calls it, with its groups in
  /// the same order.
  /// Throws ValueError, on all ranks of the grid, if the groups are none or the ranks differ in the axes' names, the
  /// device or the grid; on the rank alone for no groups, an undefined one, one that is not for the device, and for
  /// names as init_device_mesh(). StateError without a default group, CommError if a rank does not call it.
  static DeviceMesh from_group(const std::vector<ProcessGroupPtr>& groups, c10::DeviceType device_type,
                               std::vector<std::string> axis_names = {});
  /// A mesh of one axis.
  static DeviceMesh from_group(const ProcessGroupPtr& group, c10::DeviceType device_type, std::string axis_name = "");

  c10::DeviceType device_type() const;
  int64_t ndim() const;
  /// Sizes of the axes.
  const std::vector<int64_t>& shape() const;
  /// As given; without names they are "axis_0", "axis_1", ...
  const std::vector<std::string>& axis_names() const;
  /// The index among the mesh's own axes; axes made by flatten() have none (KeyError).
  int64_t axis_index(std::string_view axis_name) const;

  /// Number of ranks in all, or along one axis, by name also one made by flatten.
  int64_t size() const;
  int64_t size(int64_t axis) const;
  int64_t size(std::string_view axis_name) const;

  /// This rank's place along each axis, or along one, by name also one made by flatten.
  const std::vector<int64_t>& coordinate() const;
  int64_t local_rank(int64_t axis) const;
  int64_t local_rank(std::string_view axis_name) const;
  /// This rank's place in ranks().
  int64_t local_rank() const;

  /// All ranks of the mesh as ranks of the default group, row-major.
  const std::vector<int64_t>& ranks() const;

  /// The group of the ranks that differ from this one along the axis only, by name also one made by flatten.
  const ProcessGroupPtr& group(int64_t axis) const;
  const ProcessGroupPtr& group(std::string_view axis_name) const;
  /// The group of a 1-D mesh. Throws ValueError for more axes: flatten them first.
  const ProcessGroupPtr& group() const;

  /// The sub-mesh over the named axes, in this order; names made by flatten are allowed. Several names need braces,
  /// mesh[{"dp", "tp"}], before C++23, where mesh["dp", "tp"] does not compile.
  DeviceMesh operator[](std::string_view axis_name) const;
  DeviceMesh operator[](const std::vector<std::string>& axis_names) const;
  DeviceMesh operator[](std::initializer_list<const char*> axis_names) const;
#if defined(__cpp_multidimensional_subscript)
  template <class... Names>
  requires(sizeof...(Names) > 0 && (std::is_convertible_v<Names, std::string_view> && ...)) DeviceMesh operator[](
      std::string_view first, const Names&... others) const {
    return (*this)[std::vector<std::string>{std::string(first), std::string(std::string_view(others))...}];
  }
#endif

  /// Joins axes (none given: all) into one, with a group of its own, and returns it as a 1-D mesh; mesh[name] finds it
  /// afterwards. `name` defaults to the joined names, "dp_tp". Every rank of the whole mesh calls it. The same call
  /// again returns the same. Throws ValueError if the name means something else already.
  DeviceMesh flatten(const std::vector<std::string>& axis_names = {}, std::string name = "") const;

  /// The mesh from init_device_mesh or from_group that this one is a part of; an equal mesh if it is that one.
  DeviceMesh root() const;

  /// Same ranks, shape, names, device type, and the same rank context (comm/context/rank_context.h): meshes of two
  /// ranks that are threads of one process are never equal.
  bool operator==(const DeviceMesh& other) const;
  /// Whether collectives on both go through the same groups: copies and equal parts of one mesh do, equal meshes of two
  /// init_device_mesh calls do not.
  bool shares_groups_with(const DeviceMesh& other) const;
  /// Whether both are parts of one mesh, root().
  bool shares_root_with(const DeviceMesh& other) const;
  /// Equal meshes have equal hashes; stable over runs for ranks that are processes.
  uint64_t hash() const;
  /// A hash of the addresses of groups and root: equal for meshes that share both. For caches inside one process; never
  /// compare it between ranks.
  uint64_t groups_hash() const;
  /// "DeviceMesh(cpu, {dp: 2, tp: 3})", as fmt prints it.
  std::string to_string() const;

 private:
  friend DeviceMesh init_device_mesh(c10::DeviceType, std::vector<int64_t>, std::vector<std::string>,
                                     std::vector<int64_t>);
  explicit DeviceMesh(std::shared_ptr<const detail::MeshState> state) : state_(std::move(state)) {}

  std::shared_ptr<const detail::MeshState> state_;
};

/// Makes a mesh over all ranks of the default group, or over `ranks` of it in row-major order, with a group per axis.
/// Every rank of the mesh calls it with the same arguments, and no other does. Sets up the default group if there is
/// none. Throws ValueError if `shape` does not fit the number of ranks, or names or ranks are invalid. A mesh over all
/// ranks compares the arguments and throws on every rank; for given `ranks` nothing is compared.
DeviceMesh init_device_mesh(c10::DeviceType device_type, std::vector<int64_t> shape,
                            std::vector<std::string> axis_names = {}, std::vector<int64_t> ranks = {});

}  // namespace tessera

template <>
struct fmt::formatter<tessera::DeviceMesh> : fmt::formatter<std::string_view> {
  fmt::format_context::iterator format(const tessera::DeviceMesh& mesh, fmt::format_context& context) const;
};
