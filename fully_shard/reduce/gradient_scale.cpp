#include "fully_shard/reduce/gradient_scale.h"

#include <cmath>

namespace tessera {

GradientScale gradient_scale(const GradientScaleOptions& options) {
  if (!options.divide_factor && !options.force_sum) {
    return {};
  }
  const double factor = options.divide_factor.value_or(static_cast<double>(options.num_ranks));
  double before = 1;
  if (options.reduce_dtype == at::kHalf) {
    while (std::fmod(factor, before) == 0 && factor / before > before) {
      before *= 2;
    }
  }
  return {.before = before, .op = ReduceOp::Sum, .after = factor / before};
}

}  // namespace tessera
