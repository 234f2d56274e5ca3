#pragma once
// The grid of which process groups are the axes; internal to this package.

#include <cstdint>
#include <string>
#include <vector>

#include "comm/process_group.h"

namespace tessera {

/// The ranks of the grid, row-major, as ranks of the default group: `groups` are this rank's, one for each axis.
/// `description`: what else the ranks must agree on. Collective over each of the groups, the last first. Throws
/// ValueError, on all ranks of the grid, if the groups are not the axes of one grid or the ranks do not agree.
std::vector<int64_t> ranks_of_groups(const std::vector<ProcessGroupPtr>& groups, const std::string& description);

}  // namespace tessera
