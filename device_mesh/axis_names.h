#pragma once
// Checks the axis names of a mesh.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Returns `names`, or "axis_0", "axis_1", ... if empty. Throws ValueError, prefixed by `caller`, unless there are
/// `ndim` distinct, nonempty names.
std::vector<std::string> checked_axis_names(std::string_view caller, std::vector<std::string> names, int64_t ndim);

/// Throws a KeyError that lists `names` and suggests the closest one.
[[noreturn]] void throw_unknown_axis(const std::string& mesh, std::string_view name,
                                     const std::vector<std::string>& names);

}  // namespace tessera
