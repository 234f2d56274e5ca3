#include "debug/memory_files.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <fmt/format.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/tick_distance.h"

namespace tessera {

namespace {

// Sizes of the plot in pixels.
constexpr double kWidth = 900, kHeight = 460, kLeft = 70, kRight = 690, kTop = 50, kBottom = 410;
constexpr int kColumns = 310;

constexpr std::array<const char*, kMemoryCategories> kColors = {"#1d4ed8", "#60a5fa", "#f59e0b", "#10b981",
                                                                "#dc2626", "#f9a8d4", "#d1d5db", "#6b7280"};

using CategoryBytes = std::array<int64_t, kMemoryCategories>;

int64_t sum_of(const CategoryBytes& bytes) {
  int64_t sum = 0;
  for (const auto one : bytes) {
    sum += one;
  }
  return sum;
}

std::string in_megabytes(int64_t bytes) {
  return fmt::format("{:.1f} MB", static_cast<double>(bytes) * 1e-6);
}

/// Returns the step of an event, given the number of earlier events.
int64_t step_of(const MemoryRecord& record, size_t events) {
  for (const auto& end : record.step_ends) {
    if (events <= end.events) {
      return end.step;
    }
  }
  return record.step_ends.empty() ? 0 : record.step_ends.back().step + 1;
}

int64_t duration_ns(const MemoryRecord& record) {
  const int64_t last_event = record.events.empty() ? 1 : record.events.back().ns;
  return std::max<int64_t>({1, last_event, record.step_ends.empty() ? 1 : record.step_ends.back().ns});
}

/// Returns the live memory at the peak within each column of the plot.
std::vector<CategoryBytes> columns_of(const MemoryRecord& record) {
  std::vector<CategoryBytes> columns(kColumns);
  const double ns_per_column = static_cast<double>(duration_ns(record) + 1) / kColumns;
  CategoryBytes alive = {};
  size_t next = 0;
  for (int column = 0; column < kColumns; ++column) {
    const double end = (column + 1) * ns_per_column;
    auto& most = columns[static_cast<size_t>(column)];
    most = alive;
    for (; next < record.events.size() && static_cast<double>(record.events[next].ns) < end; ++next) {
      const auto& block = record.blocks[record.events[next].block];
      alive[static_cast<size_t>(block.category)] += record.events[next].begins ? block.bytes : -block.bytes;
      most = sum_of(alive) > sum_of(most) ? alive : most;
    }
  }
  return columns;
}

class MemoryPicture {
 public:
  explicit MemoryPicture(const MemoryRecord& record) : record_(record), columns_(columns_of(record)) {
    for (const auto& column : columns_) {
      most_ = std::max(most_, static_cast<double>(sum_of(column)));
    }
  }

  std::string draw() {
    const size_t peak = find_peak(record_);
    text_ = fmt::format(R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" height="{1}" )"
                        R"(font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>)",
                        kWidth, kHeight);
    const auto rows = alive_after(record_, peak);
    add(R"(<text x="{}" y="28" font-size="15">Memory of rank {}: at most {}, in step {}</text>)", kLeft, record_.rank,
        in_megabytes(total_bytes(rows)), step_of(record_, peak));
    add_areas();
    add_axes();
    add_legend(rows);
    return text_ + "\n</svg>\n";
  }

 private:
  double y(double bytes) const { return kBottom - bytes / most_ * (kBottom - kTop); }
  static double x(double column) { return kLeft + column / kColumns * (kRight - kLeft); }
  double x_at(double ns) const { return x(ns / static_cast<double>(duration_ns(record_)) * kColumns); }

  template <class... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    text_ += '\n' + fmt::format(format, std::forward<Args>(args)...);
  }

  /// Returns the upper edge of the sum of the first `categories` as SVG path segments.
  std::string edge(size_t categories, bool is_reversed) const {
    std::string path;
    for (int i = 0; i < kColumns; ++i) {
      const int column = is_reversed ? kColumns - 1 - i : i;
      double bytes = 0;
      for (size_t category = 0; category < categories; ++category) {
        bytes += static_cast<double>(columns_[static_cast<size_t>(column)][category]);
      }
      path += fmt::format("V{:.0f}H{:.0f}", y(bytes), x(is_reversed ? column : column + 1));
    }
    return path;
  }

  void add_areas() {
    for (size_t category = 0; category < kMemoryCategories; ++category) {
      add(R"(<path fill="{}" d="M{:.0f} {:.0f}{}{}Z"/>)", kColors[category], kLeft, kBottom, edge(category + 1, false),
          edge(category, true));
    }
  }

  void add_axes() {
    const double megabytes = most_ * 1e-6, tick = tick_distance(std::max(megabytes, 1e-6), 8);
    for (int i = 0; i * tick <= megabytes; ++i) {
      const double at = y(i * tick * 1e6);
      add(R"(<path stroke="#9ca3af" stroke-opacity="0.4" d="M{} {:.1f}H{}"/>)", kLeft, at, kRight);
      add(R"(<text x="{}" y="{:.1f}" text-anchor="end">{:.4g}</text>)", kLeft - 8, at + 4, i * tick);
    }
    const double ms = static_cast<double>(duration_ns(record_)) * 1e-6, ms_tick = tick_distance(ms, 8);
    for (int i = 0; i * ms_tick <= ms; ++i) {
      add(R"(<text x="{:.1f}" y="{}" text-anchor="middle">{:.4g}</text>)", x_at(i * ms_tick * 1e6), kBottom + 18,
          i * ms_tick);
    }
    for (const auto& end : record_.step_ends) {
      const double at = x_at(static_cast<double>(end.ns));
      add(R"(<path stroke="#374151" stroke-dasharray="4 3" d="M{:.1f} {}V{}"/>)", at, kTop - 12, kBottom);
      add(R"(<text x="{:.1f}" y="{}" text-anchor="end" fill="#374151">step {}</text>)", at - 4, kTop - 2, end.step);
    }
    add(R"(<path fill="none" stroke="black" d="M{} {}V{}H{}"/>)", kLeft, kTop, kBottom, kRight);
    add(R"(<text x="{}" y="{}" text-anchor="middle">milliseconds</text>)", (kLeft + kRight) / 2, kBottom + 38);
    add(R"svg(<text transform="translate(18 {}) rotate(-90)" text-anchor="middle">MB alive</text>)svg",
        (kTop + kBottom) / 2);
  }

  /// Adds the legend, from the top of the stack down, with each category's bytes at the peak.
  void add_legend(const std::vector<MemoryRow>& rows) {
    CategoryBytes bytes = {};
    for (const auto& row : rows) {
      bytes[static_cast<size_t>(row.category)] += row.bytes;
    }
    double at = kTop + 10;
    add(R"(<text x="{}" y="{}" fill="#374151">at the peak:</text>)", kRight + 16, at);
    for (size_t category = kMemoryCategories; category-- > 0;) {
      at += 34;
      add(R"(<rect x="{}" y="{}" width="12" height="12" fill="{}"/>)", kRight + 16, at - 11, kColors[category]);
      add(R"(<text x="{}" y="{}">{}</text>)", kRight + 34, at, to_string(static_cast<MemoryCategory>(category)));
      add(R"(<text x="{}" y="{}" fill="#374151">{}</text>)", kRight + 34, at + 15, in_megabytes(bytes[category]));
    }
  }

  const MemoryRecord& record_;
  std::vector<CategoryBytes> columns_;
  double most_ = 1;
  std::string text_;
};

std::string table_of(const std::vector<MemoryRow>& rows) {
  std::string text = fmt::format("{:>16} {:>8}  {:<26}{}\n", "bytes", "blocks", "category", "module");
  for (const auto& row : rows) {
    text += fmt::format("{:>16} {:>8}  {:<26}{}\n", row.bytes, row.blocks, to_string(row.category), row.module);
  }
  return text;
}

std::string text_of(const MemoryRecord& record) {
  const size_t peak = find_peak(record);
  const auto rows = alive_after(record, peak);
  std::string text = fmt::format("rank {}: at most {} bytes are alive, in step {}\n\n", record.rank, total_bytes(rows),
                                 step_of(record, peak)) +
                     table_of(rows);
  const auto growth = find_growth(record);
  if (record.step_ends.size() > 1) {
    const auto first = record.step_ends.front().step, last = record.step_ends.back().step;
    text += fmt::format("\nfrom the end of step {} to that of step {}, {}\n", first, last,
                        growth.empty() ? "nothing grew" : "these grew, in all by so much:");
  }
  return text + (growth.empty() ? "" : '\n' + table_of(growth));
}

using PickledDict = c10::Dict<c10::IValue, c10::IValue>;

PickledDict dict_of(std::initializer_list<std::pair<const char*, c10::IValue>> fields) {
  PickledDict dict(c10::AnyType::get(), c10::AnyType::get());
  for (const auto& [name, value] : fields) {
    dict.insert(std::string(name), value);
  }
  return dict;
}

c10::List<c10::IValue> new_list() {
  return c10::List<c10::IValue>(c10::AnyType::get());
}

/// Writes the format of torch.cuda.memory._snapshot(). Categories replace the frames' file names, and modules the
/// functions.
class MemorySnapshot {
 public:
  explicit MemorySnapshot(const MemoryRecord& record) : record_(record) {}

  std::string pickle() {
    std::set<size_t> alive;
    auto trace = new_list();
    for (const auto& event : record_.events) {
      const auto& block = record_.blocks[event.block];
      trace.push_back(dict_of({{"action", std::string(event.begins ? "alloc" : "free_completed")},
                               {"addr", static_cast<int64_t>(block.address)},
                               {"size", block.bytes},
                               {"stream", int64_t{0}},
                               {"time_us", event.ns / 1000},
                               {"frames", frames(block)}}));
      event.begins ? static_cast<void>(alive.insert(event.block)) : static_cast<void>(alive.erase(event.block));
    }
    auto segments = new_list();
    for (const auto number : alive) {
      segments.push_back(segment(record_.blocks[number]));
    }
    auto traces = new_list();
    traces.push_back(trace);
    return to_bytes(dict_of({{"segments", segments}, {"device_traces", traces}, {"allocator_settings", dict_of({})}}));
  }

 private:
  static std::string to_bytes(const c10::IValue& value) {
    std::string bytes;
    torch::jit::Pickler pickler([&](const char* data, size_t size) { bytes.append(data, size); }, nullptr, nullptr,
                                nullptr, nullptr, /*tag_aggregates=*/false);
    pickler.protocol();
    pickler.pushIValue(value);
    pickler.stop();
    return bytes;
  }

  c10::IValue frames(const MemoryBlock& block) {
    const auto key = std::pair(block.category, block.module);
    auto found = frames_.find(key);
    if (found == frames_.end()) {
      auto list = new_list();
      list.push_back(dict_of({{"filename", std::string(to_string(block.category))},
                              {"line", int64_t{0}},
                              {"name", record_.modules[block.module]}}));
      found = frames_.emplace(key, list).first;
    }
    return found->second;
  }

  PickledDict segment(const MemoryBlock& block) {
    const auto address = static_cast<int64_t>(block.address);
    auto blocks = new_list();
    blocks.push_back(dict_of({{"address", address},
                              {"size", block.bytes},
                              {"requested_size", block.bytes},
                              {"state", std::string("active_allocated")},
                              {"frames", frames(block)}}));
    return dict_of({{"device", int64_t{0}},
                    {"address", address},
                    {"total_size", block.bytes},
                    {"allocated_size", block.bytes},
                    {"active_size", block.bytes},
                    {"requested_size", block.bytes},
                    {"stream", int64_t{0}},
                    {"segment_type", std::string("large")},
                    {"segment_pool_id", std::tuple<int64_t, int64_t>(0, 0)},
                    {"is_expandable", false},
                    {"frames", frames(block)},
                    {"blocks", blocks}});
  }

  const MemoryRecord& record_;
  std::map<std::pair<MemoryCategory, size_t>, c10::IValue> frames_;
};

}  // namespace

void write_memory_files(const MemoryRecord& record, const std::string& folder) {
  std::error_code failure;
  std::filesystem::create_directories(folder, failure);
  TESSERA_CHECK(Error, !failure, "memory timeline: {}: the folder cannot be made: {}", folder, failure.message());
  const auto write = [&](const char* ending, const std::string& content) {
    const auto path = fmt::format("{}/memory-rank-{}.{}", folder, record.rank, ending);
    std::ofstream file(path, std::ios::binary);
    file << content << std::flush;
    TESSERA_CHECK(Error, file.good(), "memory timeline: {}: cannot be written: {}", path, std::strerror(errno));
  };
  write("svg", MemoryPicture(record).draw());
  write("txt", text_of(record));
  write("pickle", MemorySnapshot(record).pickle());
}

}  // namespace tessera
