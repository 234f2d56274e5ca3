#pragma once
// AdamScalars: an optimizer's learning rates and step counts on its device, where a captured step reads them.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

namespace tessera::optim {

/// Learning rates and step counts. Thread safety: one thread at a time.
class AdamScalars {
 public:
  void set_capturing(bool capturing) { is_capturing_ = capturing; }

  /// Returns the tensor of a group's learning rate, after writing a changed rate. Throws StateError if it changed while
  /// the step is being recorded.
  const at::Tensor& learning_rate(size_t group, double rate, c10::Device device);

  /// Begins a step of parameters with these step counts: adds 1 to the counts. Throws StateError for a missing count
  /// while the step is being recorded, and NotImplementedError for a second device.
  void begin_step(const std::vector<int64_t>& counts, c10::Device device);
  /// Returns the new count of parameters that had made `count` steps before.
  const at::Tensor& count(int64_t count) const { return counts_.at(count); }
  /// Ends the step; affects only the host.
  void end_step();

 private:
  struct Rate {
    double value;
    at::Tensor tensor;
  };

  bool is_capturing_ = false;
  std::map<size_t, Rate> rates_;          // by group
  std::map<int64_t, at::Tensor> counts_;  // by their values before the running step
  std::set<int64_t> used_;                // those that the last step used
};

}  // namespace tessera::optim
