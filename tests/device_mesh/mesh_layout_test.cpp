#include "device_mesh/mesh_layout.h"

#include <ostream>

#include "tests/device_mesh/mesh_helpers.h"
#include "third_party/catch2/catch.h"

namespace tessera {

// In the type's namespace, where Catch2's messages look for it.
std::ostream& operator<<(std::ostream& out, const AxisFactor& factor) {
  return out << "{" << factor.size << " by " << factor.stride << "}";
}

namespace {

const MeshLayout k234 = MeshLayout::row_major({2, 3, 4});

/// All groups of places along `axis` in a root mesh of `world_size`, by their first place.
std::vector<Ints> groups_along(const AxisLayout& axis, int64_t world_size) {
  std::vector<Ints> groups;
  for (int64_t place = 0; place < world_size; ++place) {
    if (axis_coordinate(axis, place) == 0) {
      groups.push_back(MeshLayout({axis}).ranks_through(place));
    }
  }
  return groups;
}

TEST_CASE("a row-major mesh") {
  CHECK(k234.axes() == std::vector<AxisLayout>{{{2, 12}}, {{3, 4}}, {{4, 1}}});
  CHECK(k234.shape() == Ints{2, 3, 4});
  CHECK(k234.size() == 24);
  CHECK(k234.coordinate(17) == Ints{1, 1, 1});
  CHECK(k234.coordinate(23) == Ints{1, 2, 3});
}

TEST_CASE("a slice holds the ranks that differ along its axes only") {
  const MeshLayout middle({k234.axis(1)}), outer({k234.axis(0), k234.axis(2)}), swapped({k234.axis(2), k234.axis(0)});
  CHECK(middle.ranks_through(17) == Ints{13, 17, 21});
  CHECK(outer.ranks_through(17) == Ints{4, 5, 6, 7, 16, 17, 18, 19});
  CHECK(swapped.ranks_through(17) == Ints{4, 16, 5, 17, 6, 18, 7, 19});
  CHECK(swapped.shape() == Ints{4, 2});
  CHECK(swapped.coordinate(17) == Ints{1, 1});
  CHECK(MeshLayout({}).ranks_through(5) == Ints{5});
}

TEST_CASE("flattening joins factors that one stride can say") {
  const AxisLayout first_two = join_axes({k234.axis(0), k234.axis(1)});
  CHECK(first_two == AxisLayout{{6, 4}});
  const AxisLayout outer = join_axes({k234.axis(0), k234.axis(2)});
  CHECK(outer == AxisLayout{{2, 12}, {4, 1}});
  CHECK(axis_size(outer) == 8);
  CHECK(axis_coordinate(outer, 17) == 5);
  CHECK(MeshLayout({outer}).ranks_through(17) == Ints{4, 5, 6, 7, 16, 17, 18, 19});
  CHECK(join_axes(k234.axes()) == AxisLayout{{24, 1}});
}

TEST_CASE("axes of one rank have no factor") {
  const MeshLayout layout = MeshLayout::row_major({1, 3, 1});
  CHECK(layout.shape() == Ints{1, 3, 1});
  CHECK(layout.coordinate(2) == Ints{0, 2, 0});
  CHECK(layout.axis(0).empty());
  CHECK(groups_along(layout.axis(0), 3) == std::vector<Ints>{{0}, {1}, {2}});
  CHECK(groups_along(layout.axis(1), 3) == std::vector<Ints>{{0, 1, 2}});
}

TEST_CASE("axes overlap if they share ranks' digits") {
  CHECK_FALSE(axes_overlap(k234.axis(0), k234.axis(1)));
  CHECK(axes_overlap(k234.axis(1), k234.axis(1)));
  const AxisLayout first_two = join_axes({k234.axis(0), k234.axis(1)});
  CHECK(axes_overlap(first_two, k234.axis(1)));
  CHECK(axes_overlap(k234.axis(0), first_two));
  CHECK_FALSE(axes_overlap(first_two, k234.axis(2)));
  CHECK_FALSE(axes_overlap({}, first_two));
}

TEST_CASE("the groups along each axis divide the world") {
  CHECK(groups_along(MeshLayout::row_major({2, 3}).axis(0), 6) == std::vector<Ints>{{0, 3}, {1, 4}, {2, 5}});
  CHECK(groups_along(MeshLayout::row_major({2, 3}).axis(1), 6) == std::vector<Ints>{{0, 1, 2}, {3, 4, 5}});
  for (const Ints& shape : {Ints{24}, Ints{4, 6}, Ints{2, 3, 4}, Ints{3, 1, 2, 2, 2}}) {
    const MeshLayout layout = MeshLayout::row_major(shape);
    for (const AxisLayout& axis : layout.axes()) {
      std::vector<int> seen(24, 0);
      for (const Ints& group : groups_along(axis, 24)) {
        CHECK(std::ssize(group) == axis_size(axis));
        for (size_t place = 0; place < group.size(); ++place) {
          ++seen[group[place]];
          CHECK(axis_coordinate(axis, group[place]) == static_cast<int64_t>(place));
          CHECK(MeshLayout({axis}).ranks_through(group[place]) == group);
        }
      }
      CHECK(seen == std::vector<int>(24, 1));
    }
  }
}

}  // namespace
}  // namespace tessera
