#include "checkpoint/merge_values.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "base/error.h"
#include "checkpoint/format/manifest.h"

namespace tessera::dcp {

namespace {

/// Returns the same text for values that count as equal.
std::string canonical_text(const Value& value) {
  if (const auto* number = std::get_if<int64_t>(&value)) {
    return fmt::format("int {}", *number);
  }
  if (const auto* real = std::get_if<double>(&value)) {
    return std::isnan(*real) ? "double nan" : fmt::format("double {:a}", *real);
  }
  return "string " + std::get<std::string>(value);
}

int64_t hash_value(Section section, const std::string& key, const Value& value) {
  const auto text = fmt::format("{} {} {} {}", section_name(section), key.size(), key, canonical_text(value));
  return static_cast<int64_t>(hash_bytes(text.data(), text.size()));
}

using VisitValue = std::function<void(Section, const std::string& key, const Value&)>;

void for_each(const std::map<Section, Values>& values, const VisitValue& visit) {
  for (const auto& [section, of_section] : values) {
    for (const auto& [key, value] : of_section) {
      visit(section, key, value);
    }
  }
}

int64_t count_values(const std::map<Section, Values>& values) {
  int64_t count = 0;
  for_each(values, [&](Section, const std::string&, const Value&) { ++count; });
  return count;
}

/// Returns the sorted hashes of rank 0's values on every rank.
std::vector<int64_t> rank0_hashes(const RankSync& ranks, const std::map<Section, Values>& own,
                                  const std::vector<std::string>& summaries) {
  std::vector<int64_t> hashes(std::stoull(summaries[0]));
  if (ranks.rank() == 0) {
    auto next = hashes.begin();
    for_each(own, [&](Section section, const std::string& key, const Value& value) {
      *next++ = hash_value(section, key, value);
    });
    std::ranges::sort(hashes);
  }
  ranks.broadcast_from_rank0(hashes);
  return hashes;
}

/// Returns `own` without values that have these hashes.
std::map<Section, Values> without(const std::vector<int64_t>& hashes, const std::map<Section, Values>& own) {
  std::map<Section, Values> rest;
  for_each(own, [&](Section section, const std::string& key, const Value& value) {
    if (!std::ranges::binary_search(hashes, hash_value(section, key, value))) {
      rest[section].emplace(key, value);
    }
  });
  return rest;
}

/// Adds the other ranks' values to rank 0's.
void add_others(std::map<Section, Values>& merged, const std::vector<std::string>& texts) {
  std::map<std::string, size_t> origin;  // rank that added each key
  std::set<std::string> added;
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    if (!added.insert(texts[rank]).second) {
      continue;  // from ranks with equal values
    }
    for_each(parse_values(texts[rank], "save"), [&](Section section, const std::string& key, const Value& value) {
      const auto [place, is_new] = merged[section].emplace(key, value);
      const auto name = file_key(section, key);
      if (is_new) {
        origin[name] = rank;
      }
      const auto json = [&](const Value& v) { return format_values({{section, {{key, v}}}}); };
      TESSERA_CHECK(ValueError, canonical_text(place->second) == canonical_text(value),
                    "save: '{}' differs between ranks: rank {} has {}, rank {} has {}. Give each rank a key of its own",
                    name, origin.contains(name) ? origin[name] : 0, json(place->second), rank, json(value));
    });
  }
}

}  // namespace

std::string summarize_values(const std::map<Section, Values>& values) {
  const auto text = format_values(values);
  return fmt::format("{} {:016x}", count_values(values), hash_bytes(text.data(), text.size()));
}

std::map<Section, Values> merge_values(const RankSync& ranks, std::map<Section, Values> own,
                                       const std::vector<std::string>& summaries) {
  if (std::ranges::all_of(summaries, [&](const auto& summary) { return summary == summaries[0]; })) {
    return own;
  }
  const auto hashes = rank0_hashes(ranks, own, summaries);
  const auto texts = ranks.exchange([&] { return format_values(without(hashes, own)); });
  ranks.on_rank0([&] { add_others(own, texts); });
  return own;
}

}  // namespace tessera::dcp
