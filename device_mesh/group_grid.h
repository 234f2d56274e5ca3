#pragma once
// Finds the grid whose axes are given process groups; internal to this package.

#include <cstdint>
#include <string>
#include <vector>

#include "comm/process_group.h"

namespace tessera {

/// Returns the grid's ranks in the default group, row-major. All ranks of the grid must call it. Throws ValueError on
/// all of them if the groups are not the axes of one grid, or `description` differs between ranks.
std::vector<int64_t> ranks_of_groups(const std::vector<ProcessGroupPtr>& groups, const std::string& description);

}  // namespace tessera
