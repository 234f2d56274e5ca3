#pragma once
// Learning-rate schedules: functions of the step alone, for any torch::optim optimizer.
//
//   const auto schedule = optim::cosine_schedule({.warmup_steps = 100, .total_steps = 1000, .min_ratio = 0.1});
//   const auto base_lrs = optim::get_lrs(optimizer);        // before loading a checkpoint, which has scaled rates
//   for (int64_t step = done; step < 1000; ++step) {        // resuming needs only the step
//     optim::set_lrs(optimizer, base_lrs, schedule(step));  // scales each group's own rate
//     ...
//
// Steps count from 0, and the factor of step 0 is 0 if there is a warm-up, as in transformers' schedules. After the
// last step the factor stays constant. All functions throw ValueError for numbers out of range.
//
// Thread safety: values. Source: transformers/optimization.py.

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <vector>

namespace tessera::optim {

/// Factor of the base rate by step.
struct LrSchedule {
  enum class Decay { None, Linear, Cosine, OneMinusSqrt, InverseSqrt };

  /// Returns the factor of a step.
  double operator()(int64_t step) const;
  bool operator==(const LrSchedule&) const = default;

  int64_t warmup_steps = 0;  // the factor rises linearly over these steps
  double warmup_ratio = 0;   // from this factor
  int64_t stable_steps = 0;  // with factor 1
  int64_t decay_steps = 0;
  Decay decay = Decay::None;
  double min_ratio = 0;  // the factor after all decay_steps
  double timescale = 1;  // for InverseSqrt
};

/// Rises linearly, then stays at 1.
LrSchedule constant_schedule(int64_t warmup_steps = 0);

struct DecayOptions {
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;  // including the warm-up, which must be shorter
  double min_ratio = 0;     // the last factor, from 0 to 1
};

/// Rises, then falls linearly.
LrSchedule linear_schedule(const DecayOptions& options);
/// Rises, then falls along half a cosine.
LrSchedule cosine_schedule(const DecayOptions& options);

/// Rises, then equals sqrt(timescale / (step - warmup_steps + timescale)). A timescale of 0 means warmup_steps, or
/// 10,000 without a warm-up.
LrSchedule inverse_sqrt_schedule(int64_t warmup_steps, int64_t timescale = 0);

struct WsdOptions {
  int64_t warmup_steps = 0;
  int64_t stable_steps = 0;
  int64_t decay_steps = 0;
  LrSchedule::Decay decay = LrSchedule::Decay::Cosine;  // or Linear or OneMinusSqrt
  double min_ratio = 0;                                 // factor at the start of a warm-up, and at the end
};

/// Rises, stays at 1, then falls: warm-up, stable, decay.
LrSchedule wsd_schedule(const WsdOptions& options);

/// Returns the learning rate of each parameter group.
std::vector<double> get_lrs(const torch::optim::Optimizer& optimizer);
/// Sets the learning rate of each parameter group to its base rate times `factor`.
void set_lrs(torch::optim::Optimizer& optimizer, const std::vector<double>& base_lrs, double factor);

}  // namespace tessera::optim
