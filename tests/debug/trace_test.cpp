#include "debug/trace.h"

#include <ATen/ops/ones.h>

#include "base/error.h"
#include "debug/clock_offset.h"
#include "nn/modules.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

TEST_CASE("the offset of two clocks is between what their readings allow") {
  const auto offset = offset_from_readings({{510, 525}}, {{100, 130}});
  expect_equal(offset.ns, int64_t{402});
  expect_equal(offset.error_ns, int64_t{23});
  // Clocks that differ by 1000: ranks come and go at any time, but no all-gather ends before both have begun it.
  std::vector<ClockReading> own, first;
  for (int64_t round = 0; round < 10; ++round) {
    const int64_t late = round % 3 * 7, end = 50 + round % 2 * 30;
    first.push_back({100 * round + (round % 2 == 0 ? late : 0), 100 * round + end});
    own.push_back({1000 + 100 * round + (round % 2 == 0 ? 0 : late), 1000 + 100 * round + end + round % 4});
  }
  const auto close = offset_from_readings(own, first);
  expect_equal(std::abs(close.ns - 1000) <= close.error_ns, true);
  run_ranks(3, [](int) {
    expect_equal(measure_clock_offset(default_group()).ns, int64_t{0});  // one host, one clock
  });
}

TEST_CASE("a trace of steps has a file, and none without a folder") {
  const TempFolder folder;
  nn::Sequential model(nn::Linear(3, 2), nn::ReLU());
  const auto run = [&](const std::string& path) {
    TraceSteps trace(model, {.folder = path, .steps = {2, 3}, .ops = true});
    for (int64_t step = 1; step <= 4; ++step) {
      trace.begin_step(step);
      model->forward(at::ones({4, 3})).sum().backward();
      trace.end_step(step);
    }
  };
  run("");
  run(folder.path("new/traces"));
  const auto text = read_file(folder.path("new/traces/rank-0.json"));
  const auto count = [&](std::string_view part) {
    int64_t found = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
      ++found;
    }
    return found;
  };
  expect_equal(count("\"step 2\"") + count("\"step 3\""), int64_t{2});
  expect_equal(count("\"forward model\""), int64_t{2});
  expect_equal(count("\"forward 0\""), int64_t{2});
  expect_equal(count("\"aten::addmm\""), int64_t{2});
  {
    Trace trace(model, {.folder = folder.path()});
    expect_throws<StateError>([&] { Trace(model, {.folder = folder.path()}); }, "has another one");
    model->forward(at::ones({4, 3}));
  }  // which writes nothing
  expect_equal(read_file(folder.path("rank-0.json")), std::string());
  Trace trace(model, {.folder = folder.path()});
  model->forward(at::ones({4, 3}));
  trace.stop();
  const auto ranges = read_file(folder.path("rank-0.json"));
  expect_equal(ranges.find("forward 0") != std::string::npos, true);
  expect_equal(ranges.find("aten::") == std::string::npos, true);
}

TEST_CASE("ranks that are threads, and steps that are none, are refused") {
  run_ranks(2, [](int) {
    nn::Sequential model(nn::Linear(3, 2));
    expect_throws<StateError>([&] { Trace(model, {.folder = "unused"}); }, "ranks are threads");
  });
  for (const auto* text : {"", "x", "0", "3-", "3-2", "1-2x", "-1"}) {
    expect_throws<ValueError>([&] { parse_step_range("--trace-steps", text); }, "--trace-steps");
  }
  expect_equal(parse_step_range("", "7").last, int64_t{7});
  expect_equal(parse_step_range("", "10-12").first, int64_t{10});
  expect_equal(parse_step_range("", "10-12").last, int64_t{12});
}

}  // namespace tessera::testing
