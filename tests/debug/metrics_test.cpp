#include "debug/metrics.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "comm/comm_stats.h"
#include "debug/event_file.h"
#include "debug/metrics_log.h"
#include "testing/expect.h"
#include "testing/peer_python.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

MetricValue gauge(const std::string& name, double value) {
  return {.name = name, .kind = MetricKind::Gauge, .value = value};
}

}  // namespace

TEST_CASE("metrics of all ranks are reduced together") {
  run_ranks(3, [](int rank) {
    Metrics metrics;
    auto& mean = metrics.gauge("a/mean", AcrossRanks::Mean);
    metrics.gauge("a/sum", AcrossRanks::Sum).set(rank);
    metrics.gauge("a/max", AcrossRanks::Max).set(rank);
    metrics.gauge("a/min", AcrossRanks::Min).set(rank);
    auto& counter = metrics.counter("b", AcrossRanks::Sum);
    auto& histogram = metrics.histogram("c_seconds", {0.5, 1});
    metrics.gauge("nobody_set_it", AcrossRanks::Mean);
    if (rank > 0) {
      mean.set(10 * rank);
    }
    counter.add(2);
    counter.add(rank);
    histogram.observe(0.5);
    histogram.observe(rank);
    const int64_t sent = comm_stats()[Collective::AllGather].calls;
    const auto values = metrics.reduce(default_group());
    expect_equal(comm_stats()[Collective::AllGather].calls - sent, int64_t{2});  // the names once, and the values
    const std::vector<MetricValue> expected = {
        gauge("a/mean", 15),
        gauge("a/sum", 3),
        gauge("a/max", 2),
        gauge("a/min", 0),
        {.name = "b", .kind = MetricKind::Counter, .value = 9},
        {.name = "c_seconds", .kind = MetricKind::Histogram, .value = 4.5, .bounds = {0.5, 1}, .counts = {4, 1, 1}}};
    expect_equal(values == expected, true);
    metrics.reduce(default_group());
    expect_equal(comm_stats()[Collective::AllGather].calls - sent, int64_t{3});

    mean.set(rank == 1 ? kNan : 1);
    expect_equal(std::isnan(metrics.reduce(default_group())[0].value), true);
    mean.clear();
    expect_equal(metrics.read()[0], gauge("a/sum", rank));
  });
}

TEST_CASE("ranks with different metrics all get an error, and names are checked") {
  run_ranks(2, [](int rank) {
    Metrics metrics;
    metrics.gauge(rank == 0 ? "loss" : "lss", AcrossRanks::Mean);
    expect_throws<ValueError>([&] { metrics.reduce(default_group()); }, "different metrics");
  });
  Metrics metrics;
  metrics.gauge("loss", AcrossRanks::Mean);
  expect_throws<ValueError>([&] { metrics.counter("loss", AcrossRanks::Sum); }, "already");
  for (const auto* name : {"", "/a", "a/", "a//b", "a b", "a\""}) {
    expect_throws<ValueError>([&] { metrics.gauge(name, AcrossRanks::Mean); }, "a name has");
  }
  expect_throws<ValueError>([&] { metrics.histogram("h", {1, 1}); }, "must rise");
  expect_throws<ValueError>([&] { metrics.counter("c", AcrossRanks::Sum).add(-1); }, "do not fall");
}

TEST_CASE("Prometheus' text and JSON lines") {
  const std::vector<MetricValue> values = {
      gauge("train/loss", 2.5),
      {.name = "tokens", .kind = MetricKind::Counter, .value = 7},
      gauge("norm", kNan),
      {.name = "seconds", .kind = MetricKind::Histogram, .value = 4.5, .bounds = {0.5, 1}, .counts = {4, 1, 1}}};
  expect_equal(prometheus_text(values), std::string("# TYPE tessera_train_loss gauge\n"
                                                    "tessera_train_loss 2.5\n"
                                                    "# TYPE tessera_tokens_total counter\n"
                                                    "tessera_tokens_total 7\n"
                                                    "# TYPE tessera_norm gauge\n"
                                                    "tessera_norm NaN\n"
                                                    "# TYPE tessera_seconds histogram\n"
                                                    "tessera_seconds_bucket{le=\"0.5\"} 4\n"
                                                    "tessera_seconds_bucket{le=\"1\"} 5\n"
                                                    "tessera_seconds_bucket{le=\"+Inf\"} 6\n"
                                                    "tessera_seconds_sum 4.5\n"
                                                    "tessera_seconds_count 6\n"));
  expect_equal(json_line(3, 1.5, values),
               std::string(R"({"step": 3, "time": 1.500, "train/loss": 2.5, "tokens": 7, "norm": null, "seconds": )"
                           R"({"bounds": [0.5, 1], "counts": [4, 1, 1], "sum": 4.5}})"));
}

TEST_CASE("the checksum of records is CRC-32C") {
  expect_equal(detail::crc32c("123456789"), uint32_t{0xe3069283});
  expect_equal(detail::crc32c(std::string(32, '\0')), uint32_t{0x8a9136aa});  // RFC 3720, B.4
}

TEST_CASE("a folder of metrics is read by Python") {
  const TempFolder folder;
  const auto path = folder.path("new/logs");
  for (int run = 0; run < 2; ++run) {  // a run that goes on
    MetricsLog log(path);
    for (int64_t step = 1; step <= 3; ++step) {
      log.write(
          200 * (3 * run + step),
          {gauge("train/loss", 3.0 / static_cast<double>(step)),
           gauge("norm", step == 2 ? kNan : 1e-3),
           {.name = "tokens", .kind = MetricKind::Counter, .value = 1e9 * static_cast<double>(step)},
           {.name = "seconds", .kind = MetricKind::Histogram, .value = 4.5, .bounds = {0.5, 1}, .counts = {4, 1, 1}}});
    }
  }
  if (run_peer_python("sys", "tests/debug/check_metrics.py", path + " 200 1200 train/loss norm tokens seconds")) {
    expect_throws<Error>([] { MetricsLog("/proc/none"); }, "/proc/none");
    expect_throws<ExpectationError>(
        [&] { run_peer_python("sys", "tests/debug/check_metrics.py", path + " 200 1200 other 2>&1"); },
        "check_metrics");
  }
}

}  // namespace tessera::testing
