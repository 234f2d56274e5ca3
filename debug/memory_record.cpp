#include "debug/memory_record.h"

#include <algorithm>
#include <map>
#include <utility>

namespace tessera {

namespace {

using RowKey = std::pair<MemoryCategory, size_t>;  // category and module

struct RowSum {
  int64_t bytes = 0;
  int64_t blocks = 0;
};

std::map<RowKey, RowSum> sums_after(const MemoryRecord& record, size_t events) {
  std::map<RowKey, RowSum> sums;
  for (size_t i = 0; i < events; ++i) {
    const auto& event = record.events[i];
    const auto& block = record.blocks[event.block];
    auto& sum = sums[{block.category, block.module}];
    sum.bytes += event.begins ? block.bytes : -block.bytes;
    sum.blocks += event.begins ? 1 : -1;
  }
  return sums;
}

std::vector<MemoryRow> to_rows(const MemoryRecord& record, const std::map<RowKey, RowSum>& sums) {
  std::vector<MemoryRow> rows;
  for (const auto& [key, sum] : sums) {
    if (sum.bytes > 0) {
      rows.push_back({key.first, record.modules[key.second], sum.bytes, sum.blocks});
    }
  }
  std::ranges::stable_sort(rows, std::greater(), &MemoryRow::bytes);
  return rows;
}

}  // namespace

std::string_view to_string(MemoryCategory category) {
  static constexpr std::string_view kNames[] = {"parameters",
                                                "optimizer state",
                                                "gradients",
                                                "gathered parameters",
                                                "activations",
                                                "gradients of activations",
                                                "free blocks of units",
                                                "other"};
  static_assert(std::size(kNames) == kMemoryCategories);
  return kNames[static_cast<size_t>(category)];
}

std::vector<MemoryRow> alive_after(const MemoryRecord& record, size_t events) {
  return to_rows(record, sums_after(record, events));
}

int64_t total_bytes(const std::vector<MemoryRow>& rows) {
  int64_t bytes = 0;
  for (const auto& row : rows) {
    bytes += row.bytes;
  }
  return bytes;
}

size_t find_peak(const MemoryRecord& record) {
  int64_t alive = 0, most = 0;
  size_t peak = 0;
  for (size_t i = 0; i < record.events.size(); ++i) {
    const auto& event = record.events[i];
    alive += event.begins ? record.blocks[event.block].bytes : -record.blocks[event.block].bytes;
    if (alive > most) {
      most = alive;
      peak = i + 1;
    }
  }
  return peak;
}

std::vector<MemoryRow> find_growth(const MemoryRecord& record) {
  if (record.step_ends.empty()) {
    return {};
  }
  auto growth = sums_after(record, record.step_ends.back().events);
  for (const auto& [key, sum] : sums_after(record, record.step_ends.front().events)) {
    growth[key].bytes -= sum.bytes;
    growth[key].blocks -= sum.blocks;
  }
  return to_rows(record, growth);
}

}  // namespace tessera
