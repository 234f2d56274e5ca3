#include "device_mesh/axis_names.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "base/close_names.h"
#include "base/error.h"

namespace tessera {

std::vector<std::string> checked_axis_names(std::string_view caller, std::vector<std::string> names, int64_t ndim) {
  if (names.empty()) {
    for (int64_t i = 0; i < ndim; ++i) {
      names.push_back(fmt::format("axis_{}", i));
    }
  }
  TESSERA_CHECK(ValueError, std::ssize(names) == ndim, "{}: {} axis names [{}] for {} axes; give one each", caller,
                names.size(), fmt::join(names, ", "), ndim);
  for (size_t i = 0; i < names.size(); ++i) {
    TESSERA_CHECK(ValueError, !names[i].empty(), "{}: axis {} has an empty name", caller, i);
    TESSERA_CHECK(ValueError, std::find(names.begin(), names.begin() + i, names[i]) == names.begin() + i,
                  "{}: axis name \"{}\" is there twice in [{}]; names must differ", caller, names[i],
                  fmt::join(names, ", "));
  }
  return names;
}

void throw_unknown_axis(const std::string& mesh, std::string_view name, const std::vector<std::string>& names) {
  const auto close = close_names(name, names, 1);
  throw KeyError(fmt::format("{} has no axis \"{}\"; its axes are {}{}", mesh, name, fmt::join(names, ", "),
                             close.empty() ? "" : fmt::format("; did you mean \"{}\"?", close.front())));
}

}  // namespace tessera
