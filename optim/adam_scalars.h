#pragma once
// AdamScalars: learning rates and step counts of an optimizer, on its device. A captured step reads them there.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

namespace tessera::optim {

/// Thread safety: one thread at a time.
class AdamScalars {
 public:
  void set_capturing(bool capturing) { is_capturing_ = capturing; }

  /// Returns the tensor of a group's learning rate, after writing the rate if it has changed. Throws StateError if it
  /// has while the step is recorded.
  const at::Tensor& learning_rate(size_t group, double rate, c10::Device device);

  /// Begins a step of parameters that have made so many: adds 1 to their counts. Throws StateError if some have none
  /// while the step is recorded, and NotImplementedError for a second device.
  void begin_step(const std::vector<int64_t>& counts, c10::Device device);
  /// Returns the count, 1 more, of those that had made `count` steps before.
  const at::Tensor& count(int64_t count) const { return counts_.at(count); }
  /// Ends the step, on the host alone.
  void end_step();

 private:
  struct Rate {
    double value;
    at::Tensor tensor;
  };

  bool is_capturing_ = false;
  std::map<size_t, Rate> rates_;          // by group
  std::map<int64_t, at::Tensor> counts_;  // by their values before the running step
  std::set<int64_t> used_;                // of them, by the last step
};

}  // namespace tessera::optim
