#include "device_mesh/mesh_layout.h"

#include <algorithm>

namespace tessera {

namespace {

int64_t digit(const AxisFactor& factor, int64_t rank) {
  return (rank / factor.stride) % factor.size;
}

}  // namespace

int64_t axis_size(const AxisLayout& axis) {
  int64_t size = 1;
  for (const AxisFactor& factor : axis) {
    size *= factor.size;
  }
  return size;
}

int64_t axis_coordinate(const AxisLayout& axis, int64_t rank) {
  int64_t coordinate = 0;
  for (const AxisFactor& factor : axis) {
    coordinate = coordinate * factor.size + digit(factor, rank);
  }
  return coordinate;
}

// In a row-major root, a factor owns the ranks' digits between stride and stride * size.
bool axes_overlap(const AxisLayout& a, const AxisLayout& b) {
  for (const AxisFactor& x : a) {
    for (const AxisFactor& y : b) {
      if (std::max(x.stride, y.stride) < std::min(x.stride * x.size, y.stride * y.size)) {
        return true;
      }
    }
  }
  return false;
}

AxisLayout join_axes(const std::vector<AxisLayout>& axes) {
  AxisLayout joined;
  for (const AxisLayout& axis : axes) {
    for (const AxisFactor& factor : axis) {
      if (factor.size == 1) {
        continue;
      }
      if (!joined.empty() && joined.back().stride == factor.size * factor.stride) {
        joined.back() = {.size = joined.back().size * factor.size, .stride = factor.stride};
      } else {
        joined.push_back(factor);
      }
    }
  }
  return joined;
}

MeshLayout MeshLayout::row_major(const std::vector<int64_t>& shape) {
  std::vector<AxisLayout> axes(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0; stride *= shape[i]) {
    if (shape[i] != 1) {
      axes[i] = {{.size = shape[i], .stride = stride}};
    }
  }
  return MeshLayout(std::move(axes));
}

int64_t MeshLayout::size() const {
  int64_t size = 1;
  for (const AxisLayout& axis : axes_) {
    size *= axis_size(axis);
  }
  return size;
}

std::vector<int64_t> MeshLayout::shape() const {
  std::vector<int64_t> shape;
  for (const AxisLayout& axis : axes_) {
    shape.push_back(axis_size(axis));
  }
  return shape;
}

std::vector<int64_t> MeshLayout::coordinate(int64_t rank) const {
  std::vector<int64_t> coordinate;
  for (const AxisLayout& axis : axes_) {
    coordinate.push_back(axis_coordinate(axis, rank));
  }
  return coordinate;
}

std::vector<int64_t> MeshLayout::ranks_through(int64_t rank) const {
  const AxisLayout all = join_axes(axes_);
  int64_t first = rank;
  for (const AxisFactor& factor : all) {
    first -= digit(factor, rank) * factor.stride;
  }
  std::vector<int64_t> ranks = {first};
  for (const AxisFactor& factor : all) {
    std::vector<int64_t> finer;
    for (const int64_t start : ranks) {
      for (int64_t step = 0; step < factor.size; ++step) {
        finer.push_back(start + step * factor.stride);
      }
    }
    ranks = std::move(finer);
  }
  return ranks;
}

std::vector<int64_t> ranks_along(const MeshLayout& layout, int64_t place, const std::vector<int64_t>& ranks) {
  std::vector<int64_t> along = layout.ranks_through(place);
  std::ranges::transform(along, along.begin(), [&](int64_t at) { return ranks.at(static_cast<size_t>(at)); });
  return along;
}

}  // namespace tessera
