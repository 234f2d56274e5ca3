#include "parallel/path_pattern.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera {

namespace {

/// A set such as "[!a-c]" at the front of a pattern.
struct CharacterSet {
  std::string_view members;  // "a-c"
  bool negated = false;
  size_t length = 0;  // of the whole set in the pattern; 0: there is none

  explicit CharacterSet(std::string_view pattern) {
    if (pattern.empty() || pattern[0] != '[') {
      return;
    }
    negated = pattern.size() > 1 && pattern[1] == '!';
    const size_t first = negated ? 2 : 1;
    const size_t end = pattern.find(']', first + 1);  // a ] in first place is a member
    if (end != std::string_view::npos) {
      members = pattern.substr(first, end - first);
      length = end + 1;
    }
  }

  bool has(char c) const {
    bool found = false;
    for (size_t i = 0; i < members.size(); ++i) {
      if (i + 2 < members.size() && members[i + 1] == '-') {
        found = found || (members[i] <= c && c <= members[i + 2]);
        i += 2;
      } else {
        found = found || members[i] == c;
      }
    }
    return found != negated;
  }
};

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

bool matches_component(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) {
    return name.empty();
  }
  if (pattern[0] == '*') {
    const auto rest = pattern.substr(1);
    for (size_t i = 0; i <= name.size(); ++i) {
      if (matches_component(rest, name.substr(i))) {
        return true;
      }
    }
    return false;
  }
  if (name.empty()) {
    return false;
  }
  const CharacterSet set(pattern);
  const bool fits = set.length > 0 ? set.has(name[0]) : pattern[0] == '?' || pattern[0] == name[0];
  return fits && matches_component(pattern.substr(set.length > 0 ? set.length : 1), name.substr(1));
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
