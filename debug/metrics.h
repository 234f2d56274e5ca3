#pragma once
// Metrics: named values of a program, reduced over its ranks together.
//
//   Metrics metrics;
//   Gauge& loss = metrics.gauge("train/loss", AcrossRanks::Mean);
//   Counter& tokens = metrics.counter("train/tokens", AcrossRanks::Sum);
//   Histogram& seconds = metrics.histogram("step/seconds", {0.1, 0.2, 0.5, 1});
//   ...
//   loss.set(2.5); tokens.add(4096); seconds.observe(0.3);
//   MetricsLog log("logs");                              // debug/metrics_log.h
//   log.write(step, metrics.reduce(default_group()));    // all ranks reduce; rank 0 writes

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "comm/process_group.h"

namespace tessera {

/// Reduction of the ranks' values.
enum class AcrossRanks : uint8_t { Mean, Sum, Max, Min };

/// Value that can rise and fall. Before set(), or after clear(), it is omitted from results.
class Gauge {
 public:
  void set(double value);
  void clear() { is_set_ = false; }

 private:
  friend class Metrics;
  double value_ = 0;
  bool is_set_ = false;
};

/// Running sum.
class Counter {
 public:
  void add(double value);  // throws ValueError if negative

 private:
  friend class Metrics;
  double sum_ = 0;
};

/// Counts of observations in buckets.
class Histogram {
 public:
  void observe(double value);  // counts NaN above all bounds

 private:
  friend class Metrics;
  explicit Histogram(std::vector<double> bounds) : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}
  std::vector<double> bounds_;
  std::vector<double> counts_;
  double sum_ = 0;
};

enum class MetricKind : uint8_t { Gauge, Counter, Histogram };

/// Value of a metric at one time.
struct MetricValue {
  std::string name;
  MetricKind kind = MetricKind::Gauge;
  double value = 0;                 // sum of observations for a histogram
  std::vector<double> bounds = {};  // for a histogram: upper bounds of buckets, inclusive
  std::vector<double> counts = {};  // for a histogram: observations per bucket, then those above all bounds

  bool operator==(const MetricValue&) const = default;
};

/// Registry of metrics, which owns them. A name consists of parts of letters, digits and "_" separated by "/". Throws
/// ValueError for a name that exists. Thread safety: one thread at a time.
class Metrics {
 public:
  Metrics() = default;
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  Gauge& gauge(const std::string& name, AcrossRanks across);
  Counter& counter(const std::string& name, AcrossRanks across);
  /// Registers a histogram; its counts are summed over the ranks. `bounds` must be increasing.
  Histogram& histogram(const std::string& name, std::vector<double> bounds);

  /// Returns this rank's values in order of registration.
  std::vector<MetricValue> read() const;
  /// Returns the values of all ranks with one all-gather. A gauge that only some ranks set is reduced over those. The
  /// first call after a registration throws ValueError on every rank unless all ranks registered the same metrics.
  std::vector<MetricValue> reduce(const ProcessGroupPtr& group) const;

 private:
  struct Entry {
    std::string name;
    MetricKind kind;
    AcrossRanks across;
    size_t index;  // among metrics of its kind
  };
  void add(const std::string& name, MetricKind kind, AcrossRanks across, size_t index);
  std::vector<double> numbers() const;
  std::vector<MetricValue> from_numbers(const double* numbers) const;

  std::vector<Entry> entries_;
  mutable bool is_agreed_ = false;  // whether the ranks registered the same metrics
  std::deque<Gauge> gauges_;        // a deque keeps references valid
  std::deque<Counter> counters_;
  std::deque<Histogram> histograms_;
};

}  // namespace tessera
