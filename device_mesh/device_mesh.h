#pragma once
// A named grid of ranks with a process group per axis, like torch.distributed.device_mesh.
//
//   DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 3}, {"dp", "tp"});  // 6 ranks, row-major
//
//              tp=0 tp=1 tp=2      on rank 4:
//        dp=0    0    1    2         mesh.coordinate() = {1, 1}
//        dp=1    3    4    5         mesh["tp"].ranks() = {3, 4, 5}, mesh["dp"].ranks() = {1, 4}
//
// A sub-mesh contains the calling rank and shares the groups of its mesh. docs/semantics.md has meshes over some ranks.

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

// Makes the comma in mesh["dp", "tp"] an error before C++23, where it would mean mesh["tp"].
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

/// Cheap handle to shared, immutable state, which owns references to its groups. References that accessors return are
/// valid while any copy of the mesh lives. A default-constructed mesh is empty: only ==, hashes, defined() and fmt
/// work.
/// Throws KeyError for unknown axis names and ValueError for axis indices out of range; negative ones count from the
/// end. Axis names may be those of flatten().
/// Thread safety: any number of threads may read; flatten() is for one thread per rank.
class DeviceMesh {
 public:
  DeviceMesh() = default;
  bool defined() const { return state_ != nullptr; }

  /// Makes a mesh whose axis i has this rank's groups[i], which must outlive it. All ranks of the grid must call it.
  /// Throws ValueError, on all ranks, if groups are not the axes of one grid or names or devices differ; ValueError,
  /// alone, for invalid arguments; StateError without a default group; and CommError if a rank is missing.
  static DeviceMesh from_group(const std::vector<ProcessGroupPtr>& groups, c10::DeviceType device_type,
                               std::vector<std::string> axis_names = {});
  static DeviceMesh from_group(const ProcessGroupPtr& group, c10::DeviceType device_type, std::string axis_name = "");

  c10::DeviceType device_type() const;
  int64_t ndim() const;
  const std::vector<int64_t>& shape() const;  // sizes of the axes
  const std::vector<std::string>& axis_names() const;
  int64_t axis_index(std::string_view axis_name) const;  // KeyError for axes of flatten()

  int64_t size() const;  // number of ranks
  int64_t size(int64_t axis) const;
  int64_t size(std::string_view axis_name) const;

  const std::vector<int64_t>& coordinate() const;  // this rank's place along each axis
  int64_t local_rank(int64_t axis) const;
  int64_t local_rank(std::string_view axis_name) const;
  int64_t local_rank() const;  // this rank's place in ranks()

  const std::vector<int64_t>& ranks() const;  // in the default group, row-major

  /// Returns the group of the ranks that differ from this one only along the axis.
  const ProcessGroupPtr& group(int64_t axis) const;
  const ProcessGroupPtr& group(std::string_view axis_name) const;
  const ProcessGroupPtr& group() const;  // of a 1-D mesh; otherwise throws ValueError

  /// Returns the sub-mesh over the named axes, in order. Several names need braces before C++23: mesh[{"dp", "tp"}].
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

  /// Joins axes (default: all) into one, with a new group, that mesh[name] finds later. All ranks of the whole mesh
  /// must call it. `name` defaults to "dp_tp". Throws ValueError if another axis has the name or if ranks join
  /// different axes, on all ranks.
  DeviceMesh flatten(const std::vector<std::string>& axis_names = {}, std::string name = "") const;

  DeviceMesh root() const;  // the mesh that this one is part of

  /// Returns this mesh for tensors on another type of device: the same ranks, names and groups, without communication.
  /// Throws ValueError if a group's backend is not for it.
  DeviceMesh with_device_type(c10::DeviceType device_type) const;

  /// Returns whether ranks, shape, names, device type and rank context (comm/context/rank_context.h) are equal.
  bool operator==(const DeviceMesh& other) const;
  /// Returns whether both use the same groups. Copies do; equal meshes from two init_device_mesh calls do not.
  bool shares_groups_with(const DeviceMesh& other) const;
  bool shares_root_with(const DeviceMesh& other) const;  // parts of one root()
  uint64_t hash() const;          // consistent with ==; stable across runs if ranks are processes
  uint64_t groups_hash() const;   // of group and root addresses, for caches within one process
  std::string to_string() const;  // "DeviceMesh(cpu, {dp: 2, tp: 3})"

 private:
  friend DeviceMesh init_device_mesh(c10::DeviceType, std::vector<int64_t>, std::vector<std::string>,
                                     std::vector<int64_t>);
  explicit DeviceMesh(std::shared_ptr<const detail::MeshState> state) : state_(std::move(state)) {}

  std::shared_ptr<const detail::MeshState> state_;
};

/// Makes a mesh over all ranks of the default group, or over `ranks`, in row-major order. Sets up the default group if
/// needed. All ranks of the mesh, and no others, call it with the same arguments. Throws ValueError, on all of them,
/// for arguments that do not fit or differ. `ranks` that are out of range, repeated or without the caller throw on it
/// alone.
DeviceMesh init_device_mesh(c10::DeviceType device_type, std::vector<int64_t> shape,
                            std::vector<std::string> axis_names = {}, std::vector<int64_t> ranks = {});

}  // namespace tessera

template <>
struct fmt::formatter<tessera::DeviceMesh> : fmt::formatter<std::string_view> {
  fmt::format_context::iterator format(const tessera::DeviceMesh& mesh, fmt::format_context& context) const;
};
