#include "debug/metrics_log.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "base/error.h"

namespace tessera {

namespace {

std::string made_folder(const std::string& folder) {
  std::error_code failure;
  std::filesystem::create_directories(folder, failure);
  TESSERA_CHECK(Error, !failure, "{}: the folder of metrics cannot be made: {}", folder, failure.message());
  return folder;
}

std::string json_number(double value) {
  return std::isfinite(value) ? fmt::format("{}", value) : "null";
}

std::string json_numbers(const std::vector<double>& values) {
  return fmt::format("[{}]", fmt::join(values, ", "));
}

std::string json_value(const MetricValue& value) {
  return value.kind == MetricKind::Histogram
             ? fmt::format(R"({{"bounds": {}, "counts": {}, "sum": {}}})", json_numbers(value.bounds),
                           json_numbers(value.counts), json_number(value.value))
             : json_number(value.value);
}

std::string prometheus_number(double value) {
  return std::isnan(value) ? "NaN" : std::isinf(value) ? (value > 0 ? "+Inf" : "-Inf") : fmt::format("{}", value);
}

/// Returns cumulative counts of observations up to each bound.
std::string prometheus_buckets(const std::string& name, const MetricValue& value) {
  std::string text;
  double count = 0;
  for (size_t i = 0; i < value.counts.size(); ++i) {
    count += value.counts[i];
    const auto bound = i < value.bounds.size() ? prometheus_number(value.bounds[i]) : "+Inf";
    text += fmt::format("{}_bucket{{le=\"{}\"}} {}\n", name, bound, count);
  }
  return text + fmt::format("{0}_sum {1}\n{0}_count {2}\n", name, prometheus_number(value.value), count);
}

}  // namespace

std::string json_line(int64_t step, double time, const std::vector<MetricValue>& values) {
  std::string line = fmt::format(R"({{"step": {}, "time": {:.3f})", step, time);
  for (const auto& value : values) {
    line += fmt::format(R"(, "{}": {})", value.name, json_value(value));
  }
  return line + "}";
}

std::string prometheus_text(const std::vector<MetricValue>& values) {
  std::string text;
  for (const auto& value : values) {
    std::string name = "tessera_" + value.name;
    std::ranges::replace(name, '/', '_');
    if (value.kind == MetricKind::Histogram) {
      text += fmt::format("# TYPE {} histogram\n{}", name, prometheus_buckets(name, value));
    } else {
      const bool is_counter = value.kind == MetricKind::Counter;
      name += is_counter ? "_total" : "";
      text += fmt::format("# TYPE {0} {1}\n{0} {2}\n", name, is_counter ? "counter" : "gauge",
                          prometheus_number(value.value));
    }
  }
  return text;
}

MetricsLog::MetricsLog(const std::string& folder)
    : folder_(made_folder(folder)), lines_(folder + "/metrics.jsonl", std::ios::app), events_(folder) {
  TESSERA_CHECK(Error, lines_.good(), "{}/metrics.jsonl: cannot be written: {}", folder_, std::strerror(errno));
}

void MetricsLog::write(int64_t step, const std::vector<MetricValue>& values) {
  const double time = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  lines_ << json_line(step, time, values) + "\n" << std::flush;
  TESSERA_CHECK(Error, lines_.good(), "{}/metrics.jsonl: cannot be written: {}", folder_, std::strerror(errno));
  events_.write(step, values);
  replace_prometheus_file(prometheus_text(values));
}

/// Replaces the file atomically, so that readers never see a partial one.
void MetricsLog::replace_prometheus_file(const std::string& text) const {
  const auto path = folder_ + "/metrics.prom", part = path + ".part";
  std::ofstream file(part);
  file << text << std::flush;
  TESSERA_CHECK(Error, file.good() && std::rename(part.c_str(), path.c_str()) == 0, "{}: cannot be written: {}", path,
                std::strerror(errno));
}

}  // namespace tessera
