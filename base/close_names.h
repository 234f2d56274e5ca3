#pragma once
// Finds similar names, for errors about unknown ones. Pure functions on strings.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Returns the least number of edits that turn `a` into `b`: insertions, deletions, replacements and swaps of
/// neighbors. For ("wq", "qw") it is 1.
size_t edit_distance(std::string_view a, std::string_view b);

/// Returns at most `limit` different candidates, closest first. Their edit distance is at most a third of the name's
/// length, or 1.
std::vector<std::string> close_names(std::string_view name, const std::vector<std::string>& candidates,
                                     size_t limit = 3);

}  // namespace tessera
