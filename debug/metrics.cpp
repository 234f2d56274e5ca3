#include "debug/metrics.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <utility>

#include "base/error.h"
#include "comm/all_gather_strings.h"
#include "comm/collectives.h"
#include "comm/context/flight_record.h"

namespace tessera {

namespace {

constexpr double kNotSet = -std::numeric_limits<double>::infinity();

/// Replaces infinity by the largest number, because minus infinity means "not set".
double finite_or_nan(double value) {
  return std::isinf(value) ? std::copysign(std::numeric_limits<double>::max(), value) : value;
}

bool is_name(const std::string& name) {
  const auto fits = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '/'; };
  return !name.empty() && name.front() != '/' && name.back() != '/' && name.find("//") == std::string::npos &&
         std::ranges::all_of(name, fits);
}

double combine(AcrossRanks across, double a, double b) {
  if (std::isnan(a) || std::isnan(b)) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  switch (across) {
    case AcrossRanks::Max:
      return std::max(a, b);
    case AcrossRanks::Min:
      return std::min(a, b);
    default:
      return a + b;
  }
}

/// Reduces over the ranks that set the gauge.
double reduce_gauge(AcrossRanks across, const std::vector<double>& values) {
  double result = kNotSet;
  int64_t count = 0;
  for (const double value : values) {
    if (value != kNotSet) {
      result = count++ == 0 ? value : combine(across, result, value);
    }
  }
  return across == AcrossRanks::Mean && count > 0 ? result / static_cast<double>(count) : result;
}

}  // namespace

void Gauge::set(double value) {
  value_ = value;
  is_set_ = true;
}

void Counter::add(double value) {
  TESSERA_CHECK(ValueError, !(value < 0), "Counter::add({}): counters do not fall; use a Gauge", value);
  sum_ += value;
}

void Histogram::observe(double value) {
  const auto bound = std::ranges::find_if(bounds_, [&](double limit) { return value <= limit; });
  ++counts_[static_cast<size_t>(bound - bounds_.begin())];
  sum_ += value;
}

void Metrics::add(const std::string& name, MetricKind kind, AcrossRanks across, size_t index) {
  TESSERA_CHECK(ValueError, is_name(name),
                "metric \"{}\": a name has letters, digits and \"_\", in parts that \"/\" separates", name);
  TESSERA_CHECK(ValueError, std::ranges::find(entries_, name, &Entry::name) == entries_.end(),
                "metric \"{}\": there is one of this name already", name);
  entries_.push_back({.name = name, .kind = kind, .across = across, .index = index});
  is_agreed_ = false;
}

Gauge& Metrics::gauge(const std::string& name, AcrossRanks across) {
  add(name, MetricKind::Gauge, across, gauges_.size());
  return gauges_.emplace_back();
}

Counter& Metrics::counter(const std::string& name, AcrossRanks across) {
  add(name, MetricKind::Counter, across, counters_.size());
  return counters_.emplace_back();
}

Histogram& Metrics::histogram(const std::string& name, std::vector<double> bounds) {
  TESSERA_CHECK(ValueError, !bounds.empty() && std::ranges::is_sorted(bounds, std::less_equal<>()),
                "metric \"{}\": the bounds of a histogram must rise, and there must be one", name);
  add(name, MetricKind::Histogram, AcrossRanks::Sum, histograms_.size());
  histograms_.push_back(Histogram(std::move(bounds)));
  return histograms_.back();
}

/// Returns all values in sequence: one for a gauge or counter; counts and sum for a histogram.
std::vector<double> Metrics::numbers() const {
  std::vector<double> numbers;
  for (const auto& entry : entries_) {
    if (entry.kind == MetricKind::Gauge) {
      const Gauge& gauge = gauges_[entry.index];
      numbers.push_back(gauge.is_set_ ? finite_or_nan(gauge.value_) : kNotSet);
    } else if (entry.kind == MetricKind::Counter) {
      numbers.push_back(counters_[entry.index].sum_);
    } else {
      const Histogram& histogram = histograms_[entry.index];
      numbers.insert(numbers.end(), histogram.counts_.begin(), histogram.counts_.end());
      numbers.push_back(histogram.sum_);
    }
  }
  return numbers;
}

std::vector<MetricValue> Metrics::from_numbers(const double* numbers) const {
  std::vector<MetricValue> values;
  for (const auto& entry : entries_) {
    MetricValue value{.name = entry.name, .kind = entry.kind};
    if (entry.kind == MetricKind::Histogram) {
      value.bounds = histograms_[entry.index].bounds_;
      value.counts.assign(numbers, numbers + value.bounds.size() + 1);
      numbers += value.counts.size();
    }
    value.value = *numbers++;
    if (entry.kind != MetricKind::Gauge || value.value != kNotSet) {
      values.push_back(std::move(value));
    }
  }
  return values;
}

std::vector<MetricValue> Metrics::read() const {
  return from_numbers(numbers().data());
}

std::vector<MetricValue> Metrics::reduce(const ProcessGroupPtr& group) const {
  const FlightLabel label("metrics");
  if (!is_agreed_) {
    std::string names;
    for (const auto& entry : entries_) {
      names += fmt::format("{} {} {} {}; ", entry.name, static_cast<int>(entry.kind), static_cast<int>(entry.across),
                           entry.kind == MetricKind::Histogram ? histograms_[entry.index].bounds_.size() : 0);
    }
    for (const auto& others : all_gather_strings(group, names)) {
      TESSERA_CHECK(ValueError, others == names,
                    "Metrics::reduce: the ranks registered different metrics: \"{}\" and \"{}\"", names, others);
    }
    is_agreed_ = true;
  }
  auto own = numbers();
  const auto count = static_cast<int64_t>(own.size());
  const int64_t ranks = get_world_size(group);
  const auto device = has_backend(group, at::kCPU) ? at::kCPU : at::kCUDA;
  const auto all = at::empty({ranks, count}, at::dtype(at::kDouble).device(device));
  all_gather(all, at::from_blob(own.data(), {count}, at::kDouble).to(device), group);
  const auto gathered = all.cpu();
  const auto* const first = gathered.const_data_ptr<double>();
  size_t column = 0;
  for (const auto& entry : entries_) {
    const size_t width = entry.kind == MetricKind::Histogram ? histograms_[entry.index].counts_.size() + 1 : 1;
    for (const size_t end = column + width; column < end; ++column) {
      std::vector<double> values;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        values.push_back(first[rank * count + static_cast<int64_t>(column)]);
      }
      own[column] = reduce_gauge(entry.across, values);
    }
  }
  return from_numbers(own.data());
}

}  // namespace tessera
