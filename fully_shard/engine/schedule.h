#pragma once
// Schedule: predicts the order in which the units of a tree are used, for prefetching. Integers only.
//
// Forward follows the order of the last forward. Backward follows that of the last backward. A unit that was not in it,
// or the first backward, follows the reverse of the order in which units ended this forward. Example: a root (0) and
// blocks 1 to 3 begin forward as 0 1 2 3 and end it as 1 2 3 0, so the first backward expects 0 3 2 1.

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera {

class Schedule {
 public:
  /// Starts the outermost unit's forward; the last recorded order becomes the prediction.
  void begin_forward();
  /// Records a unit at its first call.
  void record_forward(int64_t unit);
  void record_forward_end(int64_t unit);
  /// Returns the unit expected after `unit` in this forward.
  std::optional<int64_t> next_in_forward(int64_t unit) const;

  void begin_backward();
  void record_backward(int64_t unit);
  /// Returns the unit expected after `unit` in this backward.
  std::optional<int64_t> next_in_backward(int64_t unit) const;

  /// Drops the records of this iteration, after a forward or backward that failed.
  void abandon();

  const std::vector<int64_t>& forward_order() const { return forward_; }

 private:
  std::vector<int64_t> forward_, forward_end_, backward_;  // recorded in this iteration
  std::vector<int64_t> last_forward_, last_backward_;
};

}  // namespace tessera
