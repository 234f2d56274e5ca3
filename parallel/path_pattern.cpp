#include "parallel/path_pattern.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>

namespace tessera {

namespace {

bool matches_component(const std::string& pattern, const std::string& name) {
  return ::fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
}

}  // namespace

std::vector<std::string> path_components(std::string_view path) {
  std::vector<std::string> components;
  while (!path.empty()) {
    const size_t dot = path.find('.');
    components.emplace_back(path.substr(0, dot));
    if (dot != std::string_view::npos && dot + 1 == path.size()) {
      components.emplace_back();
    }
    path = dot == std::string_view::npos ? std::string_view() : path.substr(dot + 1);
  }
  return components;
}

bool matches_path(std::string_view pattern, std::string_view path) {
  const auto patterns = path_components(pattern);
  const auto names = path_components(path);
  if (patterns.size() != names.size()) {
    return false;
  }
  for (size_t i = 0; i < names.size(); ++i) {
    if (!matches_component(patterns[i], names[i])) {
      return false;
    }
  }
  return true;
}

std::string generalized_path(std::string_view pattern, std::string_view path) {
  const auto patterns = path_components(pattern);
  auto names = path_components(path);
  for (size_t i = 0; i < names.size() && patterns.size() == names.size(); ++i) {
    names[i] = matches_component(patterns[i], names[i]) ? patterns[i] : names[i];
  }
  return fmt::format("{}", fmt::join(names, "."));
}

}  // namespace tessera
