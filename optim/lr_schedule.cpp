#include "optim/lr_schedule.h"

#include <cmath>
#include <numbers>

#include "base/error.h"

namespace tessera::optim {

namespace {

constexpr int64_t kDefaultTimescale = 10'000;

/// Returns `schedule`. Throws ValueError, naming `where`, if a field is out of range.
LrSchedule checked(const char* where, const LrSchedule& schedule) {
  TESSERA_CHECK(ValueError, schedule.warmup_steps >= 0 && schedule.stable_steps >= 0,
                "{}: {} steps of warm-up and {} stable ones, must be 0 or more", where, schedule.warmup_steps,
                schedule.stable_steps);
  TESSERA_CHECK(ValueError, schedule.min_ratio >= 0 && schedule.min_ratio <= 1,
                "{}: min_ratio is {}, must be from 0 to 1", where, schedule.min_ratio);
  return schedule;
}

LrSchedule decay_schedule(const char* where, const DecayOptions& options, LrSchedule::Decay decay) {
  TESSERA_CHECK(ValueError, options.total_steps > options.warmup_steps,
                "{}: total_steps is {}, must be more than the {} warmup_steps, which are a part of them", where,
                options.total_steps, options.warmup_steps);
  return checked(where, {.warmup_steps = options.warmup_steps,
                         .decay_steps = options.total_steps - options.warmup_steps,
                         .decay = decay,
                         .min_ratio = options.min_ratio});
}

/// Returns the remaining factor, from 1 to 0, after the fraction `progress` of the decay.
double remainder(LrSchedule::Decay decay, double progress) {
  switch (decay) {
    case LrSchedule::Decay::Linear:
      return 1 - progress;
    case LrSchedule::Decay::Cosine:
      return 0.5 * (1 + std::cos(std::numbers::pi * progress));
    case LrSchedule::Decay::OneMinusSqrt:
      return 1 - std::sqrt(progress);
    default:
      return 1;
  }
}

}  // namespace

double LrSchedule::operator()(int64_t step) const {
  TESSERA_CHECK(ValueError, step >= 0, "LrSchedule: step {}, must be 0 or more", step);
  if (step < warmup_steps) {
    const double risen = static_cast<double>(step) / static_cast<double>(warmup_steps);
    return warmup_ratio + (1 - warmup_ratio) * risen;
  }
  const auto since_warmup = static_cast<double>(step - warmup_steps);
  if (decay == Decay::InverseSqrt) {
    return std::sqrt(timescale / (since_warmup + timescale));
  }
  const int64_t decayed = step - warmup_steps - stable_steps;
  if (decay == Decay::None || decayed < 0) {
    return 1;
  }
  if (decayed >= decay_steps) {
    return min_ratio;
  }
  const double progress = static_cast<double>(decayed) / static_cast<double>(decay_steps);
  return min_ratio + (1 - min_ratio) * remainder(decay, progress);
}

LrSchedule constant_schedule(int64_t warmup_steps) {
  return checked("constant_schedule", {.warmup_steps = warmup_steps});
}

LrSchedule linear_schedule(const DecayOptions& options) {
  return decay_schedule("linear_schedule", options, LrSchedule::Decay::Linear);
}

LrSchedule cosine_schedule(const DecayOptions& options) {
  return decay_schedule("cosine_schedule", options, LrSchedule::Decay::Cosine);
}

LrSchedule inverse_sqrt_schedule(int64_t warmup_steps, int64_t timescale) {
  TESSERA_CHECK(ValueError, timescale >= 0, "inverse_sqrt_schedule: timescale is {}, must be 0 or more", timescale);
  const int64_t otherwise = warmup_steps > 0 ? warmup_steps : kDefaultTimescale;
  return checked("inverse_sqrt_schedule", {.warmup_steps = warmup_steps,
                                           .decay = LrSchedule::Decay::InverseSqrt,
                                           .timescale = static_cast<double>(timescale > 0 ? timescale : otherwise)});
}

LrSchedule wsd_schedule(const WsdOptions& options) {
  TESSERA_CHECK(ValueError, options.decay_steps > 0,
                "wsd_schedule: decay_steps is {}, must be 1 or more; constant_schedule does not decay",
                options.decay_steps);
  TESSERA_CHECK(ValueError,
                options.decay == LrSchedule::Decay::Linear || options.decay == LrSchedule::Decay::Cosine ||
                    options.decay == LrSchedule::Decay::OneMinusSqrt,
                "wsd_schedule: decay must be Linear, Cosine or OneMinusSqrt");
  return checked("wsd_schedule", {.warmup_steps = options.warmup_steps,
                                  .warmup_ratio = options.min_ratio,
                                  .stable_steps = options.stable_steps,
                                  .decay_steps = options.decay_steps,
                                  .decay = options.decay,
                                  .min_ratio = options.min_ratio});
}

std::vector<double> get_lrs(const torch::optim::Optimizer& optimizer) {
  std::vector<double> lrs;
  for (const auto& group : optimizer.param_groups()) {
    lrs.push_back(group.options().get_lr());
  }
  return lrs;
}

void set_lrs(torch::optim::Optimizer& optimizer, const std::vector<double>& base_lrs, double factor) {
  auto& groups = optimizer.param_groups();
  TESSERA_CHECK(ValueError, base_lrs.size() == groups.size(),
                "set_lrs: {} base rates for {} parameter groups, one a group is needed", base_lrs.size(),
                groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    groups[i].options().set_lr(base_lrs[i] * factor);
  }
}

}  // namespace tessera::optim
