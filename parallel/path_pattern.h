#pragma once
// Matches module paths: "layers.*.wq" matches "layers.12.wq". Syntax: *, ?, [a-z] and [!abc], as in fnmatch().

#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Splits "layers.0.wq" into "layers", "0" and "wq". The empty path has no components.
std::vector<std::string> path_components(std::string_view path);

/// Returns whether both have the same number of components and all match.
bool matches_path(std::string_view pattern, std::string_view path);

/// Replaces the matching components of `path` by the pattern's if both have equally many, for error messages.
std::string generalized_path(std::string_view pattern, std::string_view path);

}  // namespace tessera
