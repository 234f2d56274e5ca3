#pragma once
// Finds similar names, for errors about unknown ones. Pure functions on strings.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Returns the least number of insertions, deletions, replacements and swaps of neighbors that turn `a` into `b`, such
/// as 1 for ("wq", "qw").
size_t edit_distance(std::string_view a, std::string_view b);

/// Returns candidates within an edit distance of a third of the name's length (at least 1), closest first, without
/// duplicates, and at most `limit`.
std::vector<std::string> close_names(std::string_view name, const std::vector<std::string>& candidates,
                                     size_t limit = 3);

}  // namespace tessera
