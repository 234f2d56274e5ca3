#include "optim/adam_scalars.h"

#include <ATen/ops/full.h>

#include "base/error.h"

namespace tessera::optim {

const at::Tensor& AdamScalars::learning_rate(size_t group, double rate, c10::Device device) {
  const auto [place, is_new] = rates_.try_emplace(group);
  auto& known = place->second;
  if (is_new || known.value != rate) {
    TESSERA_CHECK(StateError, !is_capturing_,
                  "a captured step sets the learning rate of parameter group {} from {} to {}; set it between steps",
                  group, known.value, rate);
    known.value = rate;
    if (is_new) {
      known.tensor = at::full({}, rate, at::TensorOptions(device).dtype(at::kFloat));
    } else {
      known.tensor.fill_(rate);
    }
  }
  return known.tensor;
}

void AdamScalars::begin_step(const std::vector<int64_t>& counts, c10::Device device) {
  used_ = {counts.begin(), counts.end()};
  for (const int64_t steps : used_) {
    auto& count = counts_[steps];
    if (!count.defined()) {
      TESSERA_CHECK(StateError, !is_capturing_,
                    "a captured step makes step {} of a parameter that the calls before it did not step; each "
                    "parameter must have its gradient in all of them",
                    steps + 1);
      count = at::full({}, steps, at::TensorOptions(device).dtype(at::kFloat));
    }
    TESSERA_CHECK(NotImplementedError, count.device() == device,
                  "the step of parameters on {} and {} is not captured; use an optimizer for each",
                  count.device().str(), device.str());
    count.add_(1);
  }
}

void AdamScalars::end_step() {
  std::set<int64_t> next;
  for (auto steps = used_.rbegin(); steps != used_.rend(); ++steps) {
    counts_[*steps + 1] = counts_.at(*steps);
    counts_.erase(*steps);
    next.insert(*steps + 1);
  }
  used_ = std::move(next);
}

}  // namespace tessera::optim
