#include "checkpoint/format/shard_slice.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "checkpoint/format/checkpoint_error.h"

namespace tessera::dcp {

namespace {

bool overlap(const ShardSlice& a, const ShardSlice& b) {
  for (size_t dim = 0; dim < a.sizes.size(); ++dim) {
    if (std::min(a.offsets[dim] + a.sizes[dim], b.offsets[dim] + b.sizes[dim]) <=
        std::max(a.offsets[dim], b.offsets[dim])) {
      return false;
    }
  }
  return true;
}

/// Returns the dim along which most slices have different starts.
size_t most_split_dim(const std::vector<ShardSlice>& slices) {
  size_t result = 0, most = 0;
  for (size_t dim = 0; !slices.empty() && dim < slices[0].sizes.size(); ++dim) {
    std::set<int64_t> begins;
    for (const ShardSlice& slice : slices) {
      begins.insert(slice.offsets[dim]);
    }
    if (begins.size() > most) {
      most = begins.size();
      result = dim;
    }
  }
  return result;
}

}  // namespace

int64_t num_elements(const Sizes& sizes) {
  int64_t numel = 1;
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(numel, size, &numel)) {
      return INT64_MAX;
    }
  }
  return numel;
}

int64_t ShardSlice::numel() const {
  return num_elements(sizes);
}

ShardSlice ShardSlice::whole(const Sizes& tensor) {
  return {.offsets = Sizes(tensor.size(), 0), .sizes = tensor};
}

std::string ShardSlice::to_string() const {
  std::vector<std::string> dims;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    dims.push_back(fmt::format("{}:{}", offsets[dim], offsets[dim] + sizes[dim]));
  }
  return fmt::format("[{}]", fmt::join(dims, ", "));
}

bool is_inside(const ShardSlice& slice, const Sizes& tensor) {
  if (slice.offsets.size() != tensor.size() || slice.sizes.size() != tensor.size()) {
    return false;
  }
  for (size_t dim = 0; dim < tensor.size(); ++dim) {
    if (slice.offsets[dim] < 0 || slice.sizes[dim] < 0 || slice.sizes[dim] > tensor[dim] ||
        slice.offsets[dim] > tensor[dim] - slice.sizes[dim]) {
      return false;
    }
  }
  return true;
}

ShardSlice intersection(const ShardSlice& a, const ShardSlice& b) {
  ShardSlice result = a;
  for (size_t dim = 0; dim < a.sizes.size(); ++dim) {
    const int64_t begin = std::max(a.offsets[dim], b.offsets[dim]);
    const int64_t end = std::min(a.offsets[dim] + a.sizes[dim], b.offsets[dim] + b.sizes[dim]);
    result.offsets[dim] = begin;
    result.sizes[dim] = std::max<int64_t>(end - begin, 0);
  }
  return result;
}

std::optional<std::pair<size_t, size_t>> find_overlap(const std::vector<ShardSlice>& slices) {
  const size_t dim = most_split_dim(slices);
  const auto begin = [&](size_t i) { return slices[i].sizes.empty() ? 0 : slices[i].offsets[dim]; };
  const auto end = [&](size_t i) {
    return slices[i].sizes.empty() ? 1 : slices[i].offsets[dim] + slices[i].sizes[dim];
  };
  std::vector<size_t> order(slices.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return begin(a) < begin(b); });
  for (auto slice = order.begin(); slice != order.end(); ++slice) {
    // Slices that begin after its end cannot overlap it.
    for (auto other = std::next(slice); other != order.end() && begin(*other) < end(*slice); ++other) {
      if (overlap(slices[*slice], slices[*other])) {
        return std::minmax(*slice, *other);
      }
    }
  }
  return std::nullopt;
}

void check_cover(const std::string& key, const Sizes& tensor, const std::vector<ShardSlice>& slices,
                 const std::function<const std::string&(size_t)>& file_name) {
  for (size_t i = 0; i < slices.size(); ++i) {
    TESSERA_CHECK(CheckpointError, is_inside(slices[i], tensor), "{}: tensor '{}' has a part {} outside of its sizes",
                  file_name(i), key, slices[i].to_string());
  }
  if (const auto overlap = find_overlap(slices)) {
    const auto [a, b] = *overlap;
    throw CheckpointError(fmt::format("{}: the part {} of tensor '{}' overlaps the part {} in {}", file_name(a),
                                      slices[a].to_string(), key, slices[b].to_string(), file_name(b)));
  }
  int64_t numel = 0;
  for (const ShardSlice& slice : slices) {
    numel += slice.numel();
  }
  TESSERA_CHECK(CheckpointError, numel == num_elements(tensor),
                "{}: the parts of tensor '{}' have {} elements, the tensor {}", file_name(0), key, numel,
                num_elements(tensor));
}

ShardSlice relative_to(const ShardSlice& slice, const ShardSlice& frame) {
  ShardSlice result = slice;
  for (size_t dim = 0; dim < slice.sizes.size(); ++dim) {
    result.offsets[dim] -= frame.offsets[dim];
  }
  return result;
}

std::vector<ShardSlice> split_slice(const ShardSlice& slice, int64_t max_numel) {
  const int64_t numel = slice.numel();
  if (numel == 0) {
    return {};
  }
  const auto dim =
      static_cast<size_t>(std::find_if(slice.sizes.begin(), slice.sizes.end(), [](int64_t size) { return size > 1; }) -
                          slice.sizes.begin());
  if (numel <= max_numel || dim == slice.sizes.size()) {
    return {slice};
  }
  // Rows of the first dim with more than one; a row that is too long is split again.
  const int64_t row = numel / slice.sizes[dim];
  const int64_t rows = std::max<int64_t>(1, max_numel / row);
  std::vector<ShardSlice> pieces;
  for (int64_t begin = 0; begin < slice.sizes[dim]; begin += rows) {
    ShardSlice piece = slice;
    piece.offsets[dim] += begin;
    piece.sizes[dim] = std::min(rows, slice.sizes[dim] - begin);
    const auto parts = split_slice(piece, max_numel);
    pieces.insert(pieces.end(), parts.begin(), parts.end());
  }
  return pieces;
}

Run extent(const ShardSlice& slice, const Sizes& tensor) {
  if (slice.numel() == 0) {
    return {};
  }
  int64_t first = 0, last = 0, stride = 1;
  for (size_t dim = tensor.size(); dim-- > 0;) {
    first += slice.offsets[dim] * stride;
    last += (slice.offsets[dim] + slice.sizes[dim] - 1) * stride;
    stride *= tensor[dim];
  }
  return {.in_tensor = first, .in_slice = 0, .numel = last + 1 - first};
}

void for_each_run(const ShardSlice& slice, const Sizes& tensor, const std::function<void(const Run&)>& visit) {
  const size_t ndim = tensor.size();
  if (slice.numel() == 0) {
    return;
  }
  // The slice has the full range of all dims after `outer`, so they form one run with `outer`'s own range.
  size_t outer = ndim;
  int64_t run = 1, row = 1;
  while (outer > 0 && run == row) {
    --outer;
    run *= slice.sizes[outer];
    row *= tensor[outer];
  }
  std::vector<int64_t> strides(ndim, 1);
  for (size_t dim = ndim; dim-- > 1;) {
    strides[dim - 1] = strides[dim] * tensor[dim];
  }
  int64_t start = 0;
  for (size_t dim = 0; dim < ndim; ++dim) {
    start += slice.offsets[dim] * strides[dim];
  }
  Sizes index(outer, 0);
  for (int64_t in_slice = 0;; in_slice += run) {
    visit({.in_tensor = start, .in_slice = in_slice, .numel = run});
    size_t dim = outer;
    while (dim > 0 && ++index[dim - 1] == slice.sizes[dim - 1]) {
      index[dim - 1] = 0;
      start -= (slice.sizes[dim - 1] - 1) * strides[dim - 1];
      --dim;
    }
    if (dim == 0) {
      return;
    }
    start += strides[dim - 1];
  }
}

}  // namespace tessera::dcp
