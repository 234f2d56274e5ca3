#pragma once
// Boxes: rectangular parts of a tensor, and where their elements are in its row-major data. Pure functions on values.
//
// The box {.offsets = {1, 0}, .sizes = {2, 3}} of a tensor [4, 5]:
//
//      0  1  2  3  4
//    [ 5  6  7] 8  9        Run{.in_tensor = 5, .in_box = 0, .numel = 3}
//    [10 11 12]13 14        Run{.in_tensor = 10, .in_box = 3, .numel = 3}
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

struct Box {  // offsets and sizes have equal lengths and are not negative
  Sizes offsets;
  Sizes sizes;

  int64_t numel() const;
  bool operator==(const Box&) const = default;
  auto operator<=>(const Box&) const = default;  // NOLINT(modernize-use-nullptr)

  static Box whole(const Sizes& tensor);
  std::string to_string() const;  // "[1:3, 0:3]"
};

int64_t numel_of(const Sizes& sizes);  // INT64_MAX on overflow

bool is_inside(const Box& box, const Sizes& tensor);  // false if the number of dims differs

Box intersection(const Box& a, const Box& b);  // numel() is 0 if they are disjoint

/// Returns the indices of two boxes that share an element, smaller first, if any. Fast for boxes that form a grid.
std::optional<std::pair<size_t, size_t>> find_overlap(const std::vector<Box>& boxes);

/// Throws CheckpointError that names file and key unless the boxes tile the tensor, so that a load writes every
/// element. `file_of(i)` returns the file of the i-th box, and must accept 0 without boxes.
void check_cover(const std::string& key, const Sizes& tensor, const std::vector<Box>& boxes,
                 const std::function<const std::string&(size_t)>& file_of);

Box relative_to(const Box& box, const Box& frame);  // in coordinates of `frame`, which contains it

/// Splits `box` into pieces of at most max(max_numel, 1) elements. Each is contiguous in the box, in order. Returns no
/// pieces for an empty box.
std::vector<Box> split_box(const Box& box, int64_t max_numel);

struct Run {  // elements that are contiguous in both the tensor and the box
  int64_t in_tensor = 0;
  int64_t in_box = 0;
  int64_t numel = 0;
  bool operator==(const Run&) const = default;
};

/// Returns the range from the box's first element to its last, including gaps. Empty for an empty box.
Run extent(const Box& box, const Sizes& tensor);

/// Calls `visit` for each run of the box in a tensor of `sizes`, in order. Runs are as long as possible.
void for_each_run(const Box& box, const Sizes& tensor, const std::function<void(const Run&)>& visit);

}  // namespace tessera::dcp
