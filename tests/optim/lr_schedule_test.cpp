#include "optim/lr_schedule.h"

#include <ATen/ops/ones.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <map>
#include <sstream>
#include <string>

#include "optim/fused_optimizers.h"
#include "testing/expect.h"
#include "testing/peer_python.h"
#include "testing/temp_folder.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using optim::LrSchedule;
using Decay = LrSchedule::Decay;

const std::map<std::string, LrSchedule>& schedules_of_peer() {
  static const std::map<std::string, LrSchedule> schedules = {
      {"constant", optim::constant_schedule(7)},
      {"constant_at_once", optim::constant_schedule()},
      {"linear", optim::linear_schedule({.warmup_steps = 7, .total_steps = 40})},
      {"linear_at_once", optim::linear_schedule({.total_steps = 13})},
      {"cosine", optim::cosine_schedule({.warmup_steps = 11, .total_steps = 103})},
      {"cosine_min", optim::cosine_schedule({.warmup_steps = 3, .total_steps = 30, .min_ratio = 0.1})},
      {"inverse_sqrt", optim::inverse_sqrt_schedule(9)},
      {"inverse_sqrt_timescale", optim::inverse_sqrt_schedule(9, 31)},
      {"inverse_sqrt_at_once", optim::inverse_sqrt_schedule(0)},
      {"wsd_linear",
       optim::wsd_schedule(
           {.warmup_steps = 5, .stable_steps = 8, .decay_steps = 17, .decay = Decay::Linear, .min_ratio = 0.05})},
      {"wsd_cosine", optim::wsd_schedule({.warmup_steps = 5, .stable_steps = 8, .decay_steps = 17, .min_ratio = 0.05})},
      {"wsd_1-sqrt",
       optim::wsd_schedule(
           {.warmup_steps = 5, .stable_steps = 8, .decay_steps = 17, .decay = Decay::OneMinusSqrt, .min_ratio = 0.05})},
      {"wsd_of_total", optim::wsd_schedule({.warmup_steps = 5, .stable_steps = 28, .decay_steps = 17})},
  };
  return schedules;
}

/// An optimizer with a group for each rate.
template <class Optimizer, class Options>
Optimizer make_optimizer(const std::vector<double>& lrs) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.reserve(lrs.size());
  for (const double lr : lrs) {
    groups.emplace_back(std::vector{at::ones({2}).requires_grad_()}, std::make_unique<Options>(lr));
  }
  return Optimizer(groups, Options(1));
}

}  // namespace

TEST_CASE("learning rates are those of transformers") {
  const TempFolder folder;
  if (!run_peer_python("sys", "tests/optim/lr_schedule_peer.py", folder.path("rates"))) {
    return;
  }
  const std::vector<double> base_lrs = {0.5, 3e-4};
  auto optimizer = make_optimizer<torch::optim::SGD, torch::optim::SGDOptions>(base_lrs);
  std::istringstream lines(read_file(folder.path("rates")));
  size_t schedules = 0;
  for (std::string line; std::getline(lines, line); ++schedules) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    const auto& schedule = schedules_of_peer().at(name);
    double first = 0, second = 0;
    for (int64_t step = 0; words >> first >> second; ++step) {
      INFO(name << ", step " << step);
      optim::set_lrs(optimizer, base_lrs, schedule(step));
      const auto lrs = optim::get_lrs(optimizer);
      CHECK(std::abs(lrs[0] - first) <= 1e-12);
      CHECK(std::abs(lrs[1] - second) <= 1e-12);
    }
    CHECK(words.eof());
  }
  CHECK(schedules == schedules_of_peer().size());
}

TEST_CASE("a line ends at min_ratio, and no schedule moves after its last step") {
  const auto linear = optim::linear_schedule({.warmup_steps = 2, .total_steps = 10, .min_ratio = 0.2});
  CHECK(linear(1) == 0.5);
  CHECK(linear(2) == 1);
  CHECK(std::abs(linear(6) - 0.6) < 1e-15);
  CHECK(linear(10) == 0.2);
  CHECK(linear(1'000'000) == 0.2);
  const auto cosine = optim::cosine_schedule({.total_steps = 10, .min_ratio = 0.1});
  CHECK(cosine(0) == 1);
  CHECK(cosine(15) == 0.1);
  CHECK(cosine == optim::cosine_schedule({.total_steps = 10, .min_ratio = 0.1}));
  CHECK(cosine != optim::linear_schedule({.total_steps = 10, .min_ratio = 0.1}));
}

TEST_CASE("each group of each kind of optimizer keeps its own base rate") {
  const std::vector<double> base_lrs = {1, 0.25, 0};
  const auto check = [&](torch::optim::Optimizer& optimizer) {
    CHECK(optim::get_lrs(optimizer) == base_lrs);
    for (const double factor : {0.0, 0.5, 1.0}) {
      optim::set_lrs(optimizer, base_lrs, factor);
      CHECK(optim::get_lrs(optimizer) == std::vector<double>{factor, 0.25 * factor, 0});
    }
  };
  auto fused = make_optimizer<optim::FusedAdamW, torch::optim::AdamWOptions>(base_lrs);
  auto sgd = make_optimizer<torch::optim::SGD, torch::optim::SGDOptions>(base_lrs);
  auto adagrad = make_optimizer<torch::optim::Adagrad, torch::optim::AdagradOptions>(base_lrs);
  check(fused);
  check(sgd);
  check(adagrad);

  optim::set_lrs(sgd, base_lrs, 0.5);
  for (auto& group : sgd.param_groups()) {
    group.params()[0].mutable_grad() = at::ones({2});
  }
  sgd.step();
  CHECK(sgd.param_groups()[0].params()[0][0].item<double>() == 0.5);
  CHECK(sgd.param_groups()[1].params()[0][0].item<double>() == 0.875);
  expect_throws<ValueError>([&] { optim::set_lrs(sgd, {1, 2}, 1); }, "2 base rates for 3 parameter groups");
}

TEST_CASE("numbers that make no schedule are refused") {
  expect_throws<ValueError>([] { optim::cosine_schedule({.warmup_steps = 10, .total_steps = 10}); },
                            "cosine_schedule: total_steps is 10, must be more than the 10 warmup_steps");
  expect_throws<ValueError>([] { optim::linear_schedule({.warmup_steps = -1, .total_steps = 10}); },
                            "linear_schedule: -1 steps of warm-up");
  expect_throws<ValueError>([] { optim::linear_schedule({.total_steps = 10, .min_ratio = 1.5}); }, "min_ratio is 1.5");
  expect_throws<ValueError>([] { optim::cosine_schedule({.total_steps = 10, .min_ratio = std::nan("")}); },
                            "min_ratio is nan");
  expect_throws<ValueError>([] { optim::wsd_schedule({.stable_steps = 3}); }, "decay_steps is 0");
  expect_throws<ValueError>([] { optim::wsd_schedule({.decay_steps = 3, .decay = Decay::InverseSqrt}); },
                            "decay must be Linear, Cosine or OneMinusSqrt");
  expect_throws<ValueError>([] { optim::inverse_sqrt_schedule(1, -1); }, "timescale is -1");
  expect_throws<ValueError>([] { optim::constant_schedule(3)(-1); }, "step -1");
}

}  // namespace tessera::testing
