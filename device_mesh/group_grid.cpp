#include "device_mesh/group_grid.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>

#include "base/error.h"
#include "comm/all_gather_strings.h"
#include "device_mesh/mesh_layout.h"

namespace tessera {

namespace {

using Ranks = std::vector<int64_t>;
using Groups = std::vector<ProcessGroupPtr>;

/// Gathers each rank's view of the later axes, along one axis after the other.
Ranks gather_ranks(const Groups& groups) {
  std::string text = fmt::format("{} ", get_rank());
  for (auto group = groups.rbegin(); group != groups.rend(); ++group) {
    text = fmt::format("{}", fmt::join(all_gather_strings(*group, text), ""));
  }
  std::istringstream numbers(text);
  return {std::istream_iterator<int64_t>(numbers), std::istream_iterator<int64_t>()};
}

/// Computes the ranks if no data moves: a step along an axis is equally far from every rank as from this one.
Ranks ranks_by_distance(const Groups& groups) {
  Ranks ranks = {get_rank()};
  for (const ProcessGroupPtr& group : groups) {
    Ranks finer;
    for (const int64_t rank : ranks) {
      for (const int64_t along : group_ranks(group)) {
        finer.push_back(rank + along - get_rank());
      }
    }
    ranks = std::move(finer);
  }
  return ranks;
}

/// Returns why `ranks` are not a grid with these groups as this rank's axes, or "".
std::string find_fault(const Groups& groups, const Ranks& ranks) {
  Ranks shape;
  for (const ProcessGroupPtr& group : groups) {
    shape.push_back(get_world_size(group));
  }
  const MeshLayout layout = MeshLayout::row_major(shape);
  Ranks sorted = ranks;
  std::ranges::sort(sorted);
  if (std::ssize(ranks) != layout.size() || std::ranges::adjacent_find(sorted) != sorted.end()) {
    return fmt::format("a grid [{}] has {} different ranks, but the groups lead to [{}]", fmt::join(shape, ", "),
                       layout.size(), fmt::join(ranks, ", "));
  }
  const int64_t place = std::ranges::find(ranks, get_rank()) - ranks.begin();
  for (int64_t axis = 0; axis < layout.ndim(); ++axis) {
    const Ranks along = ranks_along(MeshLayout({layout.axis(axis)}), place, ranks);
    const ProcessGroupPtr& group = groups[static_cast<size_t>(axis)];
    if (along != group_ranks(group)) {
      return fmt::format("axis {} of the grid [{}] of ranks [{}] has ranks [{}], but group '{}' has [{}]", axis,
                         fmt::join(shape, ", "), fmt::join(ranks, ", "), fmt::join(along, ", "), group_name(group),
                         fmt::join(group_ranks(group), ", "));
    }
  }
  return "";
}

/// Returns a difference between this rank and another of one of its groups, or "".
std::string find_difference(const Groups& groups, const std::string& own) {
  std::string found;
  for (const ProcessGroupPtr& group : groups) {
    const auto texts = all_gather_strings(group, own);
    const auto other = std::ranges::find_if(texts, [&](const std::string& text) { return text != own; });
    if (other != texts.end() && found.empty()) {
      found = fmt::format("rank {} has {}, rank {} has {}", get_rank(), own,
                          group_ranks(group).at(static_cast<size_t>(other - texts.begin())), *other);
    }
  }
  return found;
}

/// Spreads a fault of any rank to all ranks of the grid, along one axis after the other.
std::string spread(const Groups& groups, std::string fault) {
  for (const ProcessGroupPtr& group : groups) {
    const auto faults = all_gather_strings(group, fault);
    const auto first = std::ranges::find_if(faults, [](const std::string& text) { return !text.empty(); });
    fault = first == faults.end() ? "" : *first;
  }
  return fault;
}

}  // namespace

std::vector<int64_t> ranks_of_groups(const std::vector<ProcessGroupPtr>& groups, const std::string& description) {
  const bool moves_data =
      std::ranges::none_of(groups, [](const ProcessGroupPtr& group) { return get_backend(group) == "fake"; });
  Ranks ranks = moves_data ? gather_ranks(groups) : ranks_by_distance(groups);
  std::string fault = find_fault(groups, ranks);
  const auto difference =
      find_difference(groups, fmt::format("axes {}, ranks [{}]", description, fmt::join(ranks, ", ")));
  fault = spread(groups, fault.empty() ? difference : fault);
  TESSERA_CHECK(ValueError, fault.empty(), "DeviceMesh::from_group: the ranks' groups are not the axes of one mesh: {}",
                fault);
  return ranks;
}

}  // namespace tessera
