#pragma once
// Maps ranks to mesh coordinates with integers only, like torch's _mesh_layout.py.
//
// An axis is a list of factors (size, stride) of a row-major root mesh. A {2, 3, 4} mesh has the axes {(2, 12)}, {(3,
// 4)} and {(4, 1)}. Flattening joins factors: axes 0 and 1 become {(6, 4)}, and axes 0 and 2 become {(2, 12), (4, 1)}.
// The digit of rank r along a factor is (r / stride) % size. Here, "rank" means a place in the root mesh.

#include <cstdint>
#include <vector>

namespace tessera {

struct AxisFactor {
  int64_t size = 1;
  int64_t stride = 1;

  bool operator==(const AxisFactor&) const = default;
};

/// Factors from slowest to fastest, with no factor of size 1 and no neighbors that could be merged.
using AxisLayout = std::vector<AxisFactor>;

int64_t axis_size(const AxisLayout& axis);
int64_t axis_coordinate(const AxisLayout& axis, int64_t rank);  // of `rank` along the axis
/// Returns whether the axes share a factor or part of one.
bool axes_overlap(const AxisLayout& a, const AxisLayout& b);
/// Joins axes that do not overlap into one, the first being the slowest.
AxisLayout join_axes(const std::vector<AxisLayout>& axes);

/// Immutable layout of axes that do not overlap. Thread safety: any thread.
class MeshLayout {
 public:
  static MeshLayout row_major(const std::vector<int64_t>& shape);  // sizes are at least 1
  explicit MeshLayout(std::vector<AxisLayout> axes) : axes_(std::move(axes)) {}

  int64_t ndim() const { return static_cast<int64_t>(axes_.size()); }
  const AxisLayout& axis(int64_t index) const { return axes_[index]; }
  const std::vector<AxisLayout>& axes() const { return axes_; }
  int64_t size() const;
  std::vector<int64_t> shape() const;

  std::vector<int64_t> coordinate(int64_t rank) const;
  /// Returns the ranks that differ from `rank` only along the axes of this mesh, row-major.
  std::vector<int64_t> ranks_through(int64_t rank) const;

  bool operator==(const MeshLayout&) const = default;

 private:
  std::vector<AxisLayout> axes_;
};

/// Returns layout.ranks_through(place) as ranks, where ranks[i] is the rank at place i of the root mesh.
std::vector<int64_t> ranks_along(const MeshLayout& layout, int64_t place, const std::vector<int64_t>& ranks);

}  // namespace tessera
