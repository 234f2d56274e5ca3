#pragma once
// Parts of a tensor as integers: which elements a rank holds, and where they lie in the tensor's row-major bytes.
//
// The box {.offsets = {1, 0}, .sizes = {2, 3}} of a tensor [4, 5]:
//
//     0  1  2  3  4          in the tensor, from element      in the box, from element      elements
//   [ 5  6  7] 8  9                    5                              0                         3
//   [10 11 12]13 14                   10                              3                         3
//    15 16 17 18 19
//
// Thread safety: values.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::dcp {

using Sizes = std::vector<int64_t>;

/// Of a tensor in a file; more than libtorch's ops take.
inline constexpr size_t kMaxDims = 64;

/// offsets and sizes are equally long and not negative.
struct Box {
  Sizes offsets;
  Sizes sizes;

  int64_t numel() const;
  bool operator==(const Box&) const = default;
  auto operator<=>(const Box&) const = default;  // NOLINT(modernize-use-nullptr)

  static Box whole(const Sizes& tensor);
  /// "[1:3, 0:3]"
  std::string to_string() const;
};

/// INT64_MAX where there are more than that, as sizes from a file may say.
int64_t numel_of(const Sizes& sizes);

/// Whether the box has as many dims as the tensor and lies in it.
bool is_inside(const Box& box, const Sizes& tensor);

/// What two boxes of one tensor have in common; numel() is 0 if nothing.
Box intersection(const Box& a, const Box& b);

/// Two boxes of one tensor, by their places in `boxes`, that have an element in common, the smaller place first; none
/// if no two do. Fast for boxes that cut a tensor as ranks and blocks do, along any dims.
std::optional<std::pair<size_t, size_t>> find_overlap(const std::vector<Box>& boxes);

/// Throws CheckpointError that names file and key unless the boxes are the tensor: each lies in it, no element of it is
/// in two, and they have as many as it has. Else memory that is loaded into would stay as it was, though the sizes add
/// up. `file_of(i)`: where the i-th lies, or the tensor where there is none.
void check_cover(const std::string& key, const Sizes& tensor, const std::vector<Box>& boxes,
                 const std::function<const std::string&(size_t)>& file_of);

/// `box`, seen from the corner of `frame`, in which it lies: the same elements in a tensor of frame.sizes.
Box relative_to(const Box& box, const Box& frame);

/// `box` in pieces of at most `max_numel` elements (or one element), each of which is one run of the box's own
/// row-major elements, in their order. None for an empty box.
std::vector<Box> split_box(const Box& box, int64_t max_numel);

/// Elements that follow each other both in the tensor and in the box.
struct Run {
  int64_t in_tensor = 0;
  int64_t in_box = 0;
  int64_t numel = 0;
  bool operator==(const Run&) const = default;
};

/// The tensor's elements from the box's first one to its last, with what lies between; an empty one for an empty box.
Run extent(const Box& box, const Sizes& tensor);

/// Calls `visit` for each run of the box in a tensor of `sizes`, in order; runs are as long as they can be.
void for_each_run(const Box& box, const Sizes& tensor, const std::function<void(const Run&)>& visit);

}  // namespace tessera::dcp
