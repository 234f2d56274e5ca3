#include "dtensor/visualize_sharding.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "base/error.h"

namespace tessera {

namespace {

bool before(const DimRange& a, const DimRange& b) {
  return std::tie(a.offset, a.length) < std::tie(b.offset, b.length);
}

std::string range_text(const DimRange& range) {
  return fmt::format("{}:{}", range.offset, range.offset + range.length);
}

/// Returns the mesh coordinate of rank `index` in mesh.ranks().
std::vector<int64_t> unravel_index(int64_t index, const std::vector<int64_t>& shape) {
  std::vector<int64_t> coordinate(shape.size());
  for (size_t axis = shape.size(); axis-- > 0;) {
    coordinate[axis] = index % shape[axis];
    index /= shape[axis];
  }
  return coordinate;
}

DimRange shard_range(const DTensorSpec& spec, int64_t dim, const std::vector<int64_t>& coordinate) {
  if (dim >= spec.ndim()) {
    return {.offset = 0, .length = 1};
  }
  return local_range(spec.sizes()[static_cast<size_t>(dim)], dim, spec.placements(),
                     {.axis_sizes = spec.mesh().shape(), .coordinate = coordinate});
}

/// Returns the ranges that occur, ascending.
std::vector<DimRange> ranges(const std::vector<ShardCell>& cells, DimRange ShardCell::*member) {
  std::vector<DimRange> result;
  for (const auto& cell : cells) {
    result.push_back(cell.*member);
  }
  std::ranges::sort(result, before);
  result.erase(std::unique(result.begin(), result.end()), result.end());
  return result;
}

std::string svg_cell(const ShardCell& cell, double scale_x, double scale_y) {
  const double x = 60 + static_cast<double>(cell.columns.offset) * scale_x;
  const double y = 40 + static_cast<double>(cell.rows.offset) * scale_y;
  const double width = static_cast<double>(cell.columns.length) * scale_x;
  const double height = static_cast<double>(cell.rows.length) * scale_y;
  const auto hue = cell.ranks.front() * 67 % 360;
  return fmt::format(
      R"svg(<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="hsl({}, 60%, 80%)" stroke="black"/>)svg"
      R"svg(<text x="{:.1f}" y="{:.1f}" text-anchor="middle">{}</text>)svg"
      "\n",
      x, y, width, height, hue, x + width / 2, y + height / 2 + 4, fmt::join(cell.ranks, ", "));
}

}  // namespace

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return "undefined tensor";
  }
  if (!is_dtensor(tensor)) {
    return to_string(TensorMeta::of(tensor));
  }
  const auto& spec = *dtensor_spec(tensor);
  return fmt::format("DTensor {}, local [{}]", spec.to_string(), fmt::join(spec.local_sizes(), ", "));
}

std::vector<ShardCell> shard_cells(const at::Tensor& tensor) {
  const auto& spec = *dtensor_spec(tensor);
  TESSERA_CHECK(ValueError, spec.ndim() <= 2,
                "visualize_sharding: {} has {} dims; tensors of up to 2 dims can be shown: select() or flatten() the "
                "others",
                spec.to_string(), spec.ndim());
  std::map<std::tuple<int64_t, int64_t, int64_t, int64_t>, std::vector<int64_t>> ranks_of;
  const auto& ranks = spec.mesh().ranks();
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto coordinate = unravel_index(static_cast<int64_t>(i), spec.mesh().shape());
    const auto rows = shard_range(spec, 0, coordinate);
    const auto columns = shard_range(spec, 1, coordinate);
    if (rows.length > 0 && columns.length > 0) {
      ranks_of[{rows.offset, columns.offset, rows.length, columns.length}].push_back(ranks[i]);
    }
  }
  std::vector<ShardCell> cells;
  for (auto& [key, holders] : ranks_of) {
    const auto [row, column, num_rows, num_columns] = key;
    std::ranges::sort(holders);
    cells.push_back({.rows = {row, num_rows}, .columns = {column, num_columns}, .ranks = std::move(holders)});
  }
  return cells;
}

std::string visualize_sharding(const at::Tensor& tensor) {
  const auto cells = shard_cells(tensor);
  const auto rows = ranges(cells, &ShardCell::rows);
  const auto columns = ranges(cells, &ShardCell::columns);
  constexpr int kWidth = 16;
  std::string text = std::string(kWidth, ' ');
  for (const auto& column : columns) {
    text += tensor.dim() > 1 ? fmt::format("{:<{}}", "dim 1 " + range_text(column), kWidth) : "";
  }
  text = text.substr(0, text.find_last_not_of(' ') + 1) + "\n";
  for (const auto& row : rows) {
    std::string line = fmt::format("{:<{}}", tensor.dim() > 0 ? "dim 0 " + range_text(row) : "", kWidth);
    for (const auto& column : columns) {
      const auto cell =
          std::ranges::find_if(cells, [&](const auto& c) { return c.rows == row && c.columns == column; });
      line += fmt::format("{:<{}}", cell == cells.end() ? "" : fmt::format("{}", fmt::join(cell->ranks, ",")), kWidth);
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

std::string visualize_sharding_svg(const at::Tensor& tensor) {
  const auto cells = shard_cells(tensor);
  const double height = static_cast<double>(tensor.dim() > 0 ? std::max<int64_t>(tensor.size(0), 1) : 1);
  const double width = static_cast<double>(tensor.dim() > 1 ? std::max<int64_t>(tensor.size(1), 1) : 1);
  const double scale_x = 480 / width;
  const double scale_y = std::min(320 / height, 320.0);
  std::string text = fmt::format(
      R"svg(<svg xmlns="http://www.w3.org/2000/svg" width="600" height="400" font-family="sans-serif" font-size="12">)svg"
      "\n"
      R"svg(<text x="60" y="24">{}</text>)svg"
      "\n",
      dtensor_spec(tensor)->to_string());
  for (const auto& cell : cells) {
    text += svg_cell(cell, scale_x, scale_y);
  }
  return text + "</svg>\n";
}

}  // namespace tessera
