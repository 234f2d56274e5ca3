#include "checkpoint/format/box.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "checkpoint/format/checkpoint_error.h"

namespace tessera::dcp {

namespace {

bool overlap(const Box& a, const Box& b) {
  for (size_t dim = 0; dim < a.sizes.size(); ++dim) {
    if (std::min(a.offsets[dim] + a.sizes[dim], b.offsets[dim] + b.sizes[dim]) <=
        std::max(a.offsets[dim], b.offsets[dim])) {
      return false;
    }
  }
  return true;
}

/// The dim along which most boxes begin elsewhere.
size_t most_cut_dim(const std::vector<Box>& boxes) {
  size_t result = 0, most = 0;
  for (size_t dim = 0; !boxes.empty() && dim < boxes[0].sizes.size(); ++dim) {
    std::set<int64_t> begins;
    for (const Box& box : boxes) {
      begins.insert(box.offsets[dim]);
    }
    if (begins.size() > most) {
      most = begins.size();
      result = dim;
    }
  }
  return result;
}

}  // namespace

int64_t numel_of(const Sizes& sizes) {
  int64_t numel = 1;
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(numel, size, &numel)) {
      return INT64_MAX;
    }
  }
  return numel;
}

int64_t Box::numel() const {
  return numel_of(sizes);
}

Box Box::whole(const Sizes& tensor) {
  return {.offsets = Sizes(tensor.size(), 0), .sizes = tensor};
}

std::string Box::to_string() const {
  std::vector<std::string> dims;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    dims.push_back(fmt::format("{}:{}", offsets[dim], offsets[dim] + sizes[dim]));
  }
  return fmt::format("[{}]", fmt::join(dims, ", "));
}

bool is_inside(const Box& box, const Sizes& tensor) {
  if (box.offsets.size() != tensor.size() || box.sizes.size() != tensor.size()) {
    return false;
  }
  for (size_t dim = 0; dim < tensor.size(); ++dim) {
    if (box.offsets[dim] < 0 || box.sizes[dim] < 0 || box.sizes[dim] > tensor[dim] ||
        box.offsets[dim] > tensor[dim] - box.sizes[dim]) {
      return false;
    }
  }
  return true;
}

Box intersection(const Box& a, const Box& b) {
  Box result = a;
  for (size_t dim = 0; dim < a.sizes.size(); ++dim) {
    const int64_t begin = std::max(a.offsets[dim], b.offsets[dim]);
    const int64_t end = std::min(a.offsets[dim] + a.sizes[dim], b.offsets[dim] + b.sizes[dim]);
    result.offsets[dim] = begin;
    result.sizes[dim] = std::max<int64_t>(end - begin, 0);
  }
  return result;
}

std::optional<std::pair<size_t, size_t>> find_overlap(const std::vector<Box>& boxes) {
  const size_t dim = most_cut_dim(boxes);
  const auto begin_of = [&](size_t i) { return boxes[i].sizes.empty() ? 0 : boxes[i].offsets[dim]; };
  const auto end_of = [&](size_t i) {
    return boxes[i].sizes.empty() ? 1 : boxes[i].offsets[dim] + boxes[i].sizes[dim];
  };
  std::vector<size_t> order(boxes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return begin_of(a) < begin_of(b); });
  for (auto box = order.begin(); box != order.end(); ++box) {
    // Those that begin behind its end cannot meet it.
    for (auto other = std::next(box); other != order.end() && begin_of(*other) < end_of(*box); ++other) {
      if (overlap(boxes[*box], boxes[*other])) {
        return std::minmax(*box, *other);
      }
    }
  }
  return std::nullopt;
}

void check_cover(const std::string& key, const Sizes& tensor, const std::vector<Box>& boxes,
                 const std::function<const std::string&(size_t)>& file_of) {
  for (size_t i = 0; i < boxes.size(); ++i) {
    TESSERA_CHECK(CheckpointError, is_inside(boxes[i], tensor), "{}: tensor '{}' has a part {} outside of its sizes",
                  file_of(i), key, boxes[i].to_string());
  }
  if (const auto overlap = find_overlap(boxes)) {
    const auto [a, b] = *overlap;
    throw CheckpointError(fmt::format("{}: the part {} of tensor '{}' overlaps the part {} in {}", file_of(a),
                                      boxes[a].to_string(), key, boxes[b].to_string(), file_of(b)));
  }
  int64_t numel = 0;
  for (const Box& box : boxes) {
    numel += box.numel();
  }
  TESSERA_CHECK(CheckpointError, numel == numel_of(tensor),
                "{}: the parts of tensor '{}' have {} elements, the tensor {}", file_of(0), key, numel,
                numel_of(tensor));
}

Box relative_to(const Box& box, const Box& frame) {
  Box result = box;
  for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
    result.offsets[dim] -= frame.offsets[dim];
  }
  return result;
}

std::vector<Box> split_box(const Box& box, int64_t max_numel) {
  const int64_t numel = box.numel();
  if (numel == 0) {
    return {};
  }
  const auto dim = static_cast<size_t>(
      std::find_if(box.sizes.begin(), box.sizes.end(), [](int64_t size) { return size > 1; }) - box.sizes.begin());
  if (numel <= max_numel || dim == box.sizes.size()) {
    return {box};
  }
  // Rows of the first dim that has several; a row that is too long is split in turn.
  const int64_t row = numel / box.sizes[dim];
  const int64_t rows = std::max<int64_t>(1, max_numel / row);
  std::vector<Box> pieces;
  for (int64_t begin = 0; begin < box.sizes[dim]; begin += rows) {
    Box piece = box;
    piece.offsets[dim] += begin;
    piece.sizes[dim] = std::min(rows, box.sizes[dim] - begin);
    const auto parts = split_box(piece, max_numel);
    pieces.insert(pieces.end(), parts.begin(), parts.end());
  }
  return pieces;
}

Run extent(const Box& box, const Sizes& tensor) {
  if (box.numel() == 0) {
    return {};
  }
  int64_t first = 0, last = 0, stride = 1;
  for (size_t dim = tensor.size(); dim-- > 0;) {
    first += box.offsets[dim] * stride;
    last += (box.offsets[dim] + box.sizes[dim] - 1) * stride;
    stride *= tensor[dim];
  }
  return {.in_tensor = first, .in_box = 0, .numel = last + 1 - first};
}

void for_each_run(const Box& box, const Sizes& tensor, const std::function<void(const Run&)>& visit) {
  const size_t ndim = tensor.size();
  if (box.numel() == 0) {
    return;
  }
  // Dims behind `outer` are whole in the box, so that they and `outer`'s own range are one run.
  size_t outer = ndim;
  int64_t run = 1, row = 1;
  while (outer > 0 && run == row) {
    --outer;
    run *= box.sizes[outer];
    row *= tensor[outer];
  }
  std::vector<int64_t> strides(ndim, 1);
  for (size_t dim = ndim; dim-- > 1;) {
    strides[dim - 1] = strides[dim] * tensor[dim];
  }
  int64_t start = 0;
  for (size_t dim = 0; dim < ndim; ++dim) {
    start += box.offsets[dim] * strides[dim];
  }
  Sizes index(outer, 0);
  for (int64_t in_box = 0;; in_box += run) {
    visit({.in_tensor = start, .in_box = in_box, .numel = run});
    size_t dim = outer;
    while (dim > 0 && ++index[dim - 1] == box.sizes[dim - 1]) {
      index[dim - 1] = 0;
      start -= (box.sizes[dim - 1] - 1) * strides[dim - 1];
      --dim;
    }
    if (dim == 0) {
      return;
    }
    start += strides[dim - 1];
  }
}

}  // namespace tessera::dcp
