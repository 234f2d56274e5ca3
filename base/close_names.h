#pragma once
// Names that a user may have meant: pure functions on strings, for errors about names that do not exist.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// The smallest number of insertions, deletions, replacements and swaps of neighbours that make `b` of `a`.
/// edit_distance("wq", "qw") = 1.
size_t edit_distance(std::string_view a, std::string_view b);

/// Those of `candidates` that are at most a third of the name's length (and at least one edit) away from `name`,
/// the closest first, equally close ones in their order, each once, and at most `limit` of them.
std::vector<std::string> close_names(std::string_view name, const std::vector<std::string>& candidates,
                                     size_t limit = 3);

}  // namespace tessera
