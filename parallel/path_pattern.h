#pragma once
// Patterns of module paths: pure functions on strings.
//
//   matches_path("layers.*.wq", "layers.12.wq")        true
//   matches_path("layers.*", "layers.12.wq")           false: a wildcard stays within its component
//   matches_path("layers.[0-3].w?", "layers.2.wk")     true
//
// A component may hold * (any characters), ? (one character), [abc], [a-z] (one of these) and [!abc] (none of these),
// as for POSIX's fnmatch(), and Python's, which torch.distributed.tensor.parallel.parallelize_module applies to
// components too.

#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// "layers.0.wq" → "layers", "0", "wq". The empty path has no components.
std::vector<std::string> path_components(std::string_view path);

/// Whether there are equally many components and each matches. The empty pattern matches the empty path only.
bool matches_path(std::string_view pattern, std::string_view path);

/// `path` with the components of `pattern` in the place of those that they match, from the front, where both have
/// equally many: ("layers.*.wqq", "layers.0.wq") → "layers.*.wq". Else `path` itself.
std::string generalized_path(std::string_view pattern, std::string_view path);

}  // namespace tessera
