#pragma once
// The names of a mesh's axes: checks, and a helpful error for one that is not there.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// `names`, or "axis_0", "axis_1", ... if there are none. Throws ValueError for a count that is not `ndim`, an empty
/// name, and a name that is there twice; `caller` opens the message.
std::vector<std::string> checked_axis_names(std::string_view caller, std::vector<std::string> names, int64_t ndim);

/// Throws KeyError: `mesh` (as printed) has no axis `name`, but those of `names`; did you mean ...?
[[noreturn]] void throw_unknown_axis(const std::string& mesh, std::string_view name,
                                     const std::vector<std::string>& names);

}  // namespace tessera
