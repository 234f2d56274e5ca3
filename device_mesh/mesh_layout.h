#pragma once
// Where the ranks of a mesh lie: integers only.
//
// Places 0 to n-1 fill the root mesh row-major, and are its ranks unless the mesh says otherwise (mesh_state.h); "rank"
// means the place here. An axis is a list of factors (size, stride): a step along the factor adds `stride` to the rank.
// A {2, 3, 4} mesh has the axes {(2, 12)}, {(3, 4)}, {(4, 1)}. Slicing picks axes; flattening joins their factors: axes
// 0 and 1 together are {(6, 4)}, axes 0 and 2 are {(2, 12), (4, 1)}, which no single stride can say. The digit of rank
// r along a factor is (r / stride) % size, so rank 17 has coordinate {1, 1, 1} in the mesh above.
//
// After torch's _mesh_layout.py, whose nested sizes and strides these factors are.

#include <cstdint>
#include <vector>

namespace tessera {

struct AxisFactor {
  int64_t size = 1;
  int64_t stride = 1;

  bool operator==(const AxisFactor&) const = default;
};

/// The slowest factor first; neighbours that one stride can say are one factor, and none has size 1.
using AxisLayout = std::vector<AxisFactor>;

int64_t axis_size(const AxisLayout& axis);
/// The place of `rank` along the axis.
int64_t axis_coordinate(const AxisLayout& axis, int64_t rank);
/// Whether the axes share a factor or a part of one.
bool axes_overlap(const AxisLayout& a, const AxisLayout& b);
/// One axis over all of them, the first slowest. The axes must not overlap.
AxisLayout join_axes(const std::vector<AxisLayout>& axes);

/// A value. Thread safety: immutable.
class MeshLayout {
 public:
  /// All of shape's ranks, row-major. Sizes are at least 1.
  static MeshLayout row_major(const std::vector<int64_t>& shape);
  /// A mesh of axes that do not overlap.
  explicit MeshLayout(std::vector<AxisLayout> axes) : axes_(std::move(axes)) {}

  int64_t ndim() const { return static_cast<int64_t>(axes_.size()); }
  const AxisLayout& axis(int64_t index) const { return axes_[index]; }
  const std::vector<AxisLayout>& axes() const { return axes_; }
  int64_t size() const;
  std::vector<int64_t> shape() const;

  std::vector<int64_t> coordinate(int64_t rank) const;
  /// The ranks that differ from `rank` along the axes of this mesh only, row-major.
  std::vector<int64_t> ranks_through(int64_t rank) const;

  bool operator==(const MeshLayout&) const = default;

 private:
  std::vector<AxisLayout> axes_;
};

/// The ranks at layout.ranks_through(place), in a root mesh whose rank at place i is ranks[i].
std::vector<int64_t> ranks_along(const MeshLayout& layout, int64_t place, const std::vector<int64_t>& ranks);

}  // namespace tessera
