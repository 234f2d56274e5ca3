#pragma once
// Slices: rectangular parts of a tensor, and where their elements are in its row-major data. Pure functions on values.
//
// The slice {.offsets = {1, 0}, .sizes = {2, 3}} of a tensor [4, 5]:
//
//      0  1  2  3  4
//    [ 5  6  7] 8  9        Run{.in_tensor = 5, .in_slice = 0, .numel = 3}
//    [10 11 12]13 14        Run{.in_tensor = 10, .in_slice = 3, .numel = 3}
//     15 16 17 18 19

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::dcp {

using Sizes = std::vector<int64_t>;

inline constexpr size_t kMaxDims = 64;  // of a tensor in a file; more than libtorch's ops support

struct ShardSlice {  // offsets and sizes have equal lengths and are not negative
  Sizes offsets;
  Sizes sizes;

  int64_t numel() const;
  bool operator==(const ShardSlice&) const = default;
  auto operator<=>(const ShardSlice&) const = default;  // NOLINT(modernize-use-nullptr)

  static ShardSlice whole(const Sizes& tensor);
  std::string to_string() const;  // "[1:3, 0:3]"
};

int64_t num_elements(const Sizes& sizes);  // INT64_MAX on overflow

bool is_inside(const ShardSlice& slice, const Sizes& tensor);  // false if the number of dims differs

ShardSlice intersection(const ShardSlice& a, const ShardSlice& b);  // numel() is 0 if they are disjoint

/// Returns the indices of two slices that share an element, smaller first, if any. Fast for slices that form a grid.
std::optional<std::pair<size_t, size_t>> find_overlap(const std::vector<ShardSlice>& slices);

/// Throws CheckpointError that names file and key unless the slices tile the tensor, so that a load writes every
/// element. `file_name(i)` returns the file of the i-th slice, and must accept 0 without slices.
void check_cover(const std::string& key, const Sizes& tensor, const std::vector<ShardSlice>& slices,
                 const std::function<const std::string&(size_t)>& file_name);

/// Returns the slice in coordinates of `frame`, which contains it.
ShardSlice relative_to(const ShardSlice& slice, const ShardSlice& frame);

/// Splits `slice` into pieces of at most max(max_numel, 1) elements. Each is contiguous in the slice, in order. Returns
/// no pieces for an empty slice.
std::vector<ShardSlice> split_slice(const ShardSlice& slice, int64_t max_numel);

struct Run {  // elements that are contiguous in both the tensor and the slice
  int64_t in_tensor = 0;
  int64_t in_slice = 0;
  int64_t numel = 0;
  bool operator==(const Run&) const = default;
};

/// Returns the range from the slice's first element to its last, including gaps. Empty for an empty slice.
Run extent(const ShardSlice& slice, const Sizes& tensor);

/// Calls `visit` for each run of the slice in a tensor of `sizes`, in order. Runs are as long as possible.
void for_each_run(const ShardSlice& slice, const Sizes& tensor, const std::function<void(const Run&)>& visit);

}  // namespace tessera::dcp
