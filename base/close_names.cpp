#include "base/close_names.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace tessera {

size_t edit_distance(std::string_view a, std::string_view b) {
  // Rows of the table of distances between prefixes: the one before the last, the last and the current one.
  std::vector<size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    std::swap(before, last);
    std::swap(last, row);
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({replaced, last[j] + 1, row[j - 1] + 1});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      row[j] = swapped ? std::min(row[j], before[j - 2] + 1) : row[j];
    }
  }
  return row[b.size()];
}

std::vector<std::string> close_names(std::string_view name, const std::vector<std::string>& candidates, size_t limit) {
  const size_t most = std::max<size_t>(1, name.size() / 3);
  std::vector<std::pair<size_t, std::string>> found;
  for (const auto& candidate : candidates) {
    const size_t distance = edit_distance(name, candidate);
    const bool known = std::ranges::any_of(found, [&](const auto& other) { return other.second == candidate; });
    if (distance <= most && !known) {
      found.emplace_back(distance, candidate);
    }
  }
  std::ranges::stable_sort(found, {}, &std::pair<size_t, std::string>::first);
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(limit, found.size()); ++i) {
    names.push_back(found[i].second);
  }
  return names;
}

}  // namespace tessera
