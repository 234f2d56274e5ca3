#include "device_mesh/axis_names.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace tessera {

namespace {

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row[b.size()];
}

}  // namespace

std::vector<std::string> checked_axis_names(std::vector<std::string> names, int64_t ndim) {
  if (names.empty()) {
    for (int64_t i = 0; i < ndim; ++i) {
      names.push_back(fmt::format("axis_{}", i));
    }
  }
  TESSERA_CHECK(ValueError, std::ssize(names) == ndim,
                "init_device_mesh: {} axis names [{}] for {} axes; give one each", names.size(), fmt::join(names, ", "),
                ndim);
  for (size_t i = 0; i < names.size(); ++i) {
    TESSERA_CHECK(ValueError, !names[i].empty(), "init_device_mesh: axis {} has an empty name", i);
    TESSERA_CHECK(ValueError, std::find(names.begin(), names.begin() + i, names[i]) == names.begin() + i,
                  "init_device_mesh: axis name \"{}\" is there twice in [{}]; names must differ", names[i],
                  fmt::join(names, ", "));
  }
  return names;
}

std::string closest_name(std::string_view name, const std::vector<std::string>& names) {
  std::string closest;
  size_t fewest = std::max<size_t>(1, name.size() / 2) + 1;
  for (const std::string& candidate : names) {
    if (const size_t distance = edit_distance(name, candidate); distance < fewest) {
      fewest = distance;
      closest = candidate;
    }
  }
  return closest;
}

void throw_unknown_axis(const std::string& mesh, std::string_view name, const std::vector<std::string>& names) {
  const std::string closest = closest_name(name, names);
  throw KeyError(fmt::format("{} has no axis \"{}\"; its axes are {}{}", mesh, name, fmt::join(names, ", "),
                             closest.empty() ? "" : fmt::format("; did you mean \"{}\"?", closest)));
}

}  // namespace tessera
