#pragma once
// Metrics: named numbers of a program, reduced over its ranks together.
//
//   Metrics metrics;
//   Gauge& loss = metrics.gauge("train/loss", AcrossRanks::Mean);
//   Counter& tokens = metrics.counter("train/tokens", AcrossRanks::Sum);
//   Histogram& seconds = metrics.histogram("step/seconds", {0.1, 0.2, 0.5, 1});
//   ...
//   loss.set(2.5); tokens.add(4096); seconds.observe(0.3);
//   MetricsLog log("logs");                              // debug/metrics_log.h
//   log.write(step, metrics.reduce(default_group()));    // all ranks reduce, and rank 0 writes

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "comm/process_group.h"

namespace tessera {

/// How values of the ranks become one.
enum class AcrossRanks : uint8_t { Mean, Sum, Max, Min };

/// A value that rises and falls. Without set(), it is left out of what is read.
class Gauge {
 public:
  void set(double value);
  void clear() { is_set_ = false; }

 private:
  friend class Metrics;
  double value_ = 0;
  bool is_set_ = false;
};

/// A sum.
class Counter {
 public:
  void add(double value);  // throws ValueError if it is negative

 private:
  friend class Metrics;
  double sum_ = 0;
};

/// Counts of observations by size.
class Histogram {
 public:
  void observe(double value);  // NaN counts as above all bounds

 private:
  friend class Metrics;
  explicit Histogram(std::vector<double> bounds) : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}
  std::vector<double> bounds_;
  std::vector<double> counts_;
  double sum_ = 0;
};

enum class MetricKind : uint8_t { Gauge, Counter, Histogram };

/// A metric's value at one time.
struct MetricValue {
  std::string name;
  MetricKind kind = MetricKind::Gauge;
  double value = 0;                 // of a histogram: the sum of observations
  std::vector<double> bounds = {};  // of a histogram: counts[i] observations are at most bounds[i] and above the one
  std::vector<double> counts = {};  // before; the last count is of those above all bounds

  bool operator==(const MetricValue&) const = default;
};

/// Registry. References that it returns live as long as it. Names consist of letters, digits and "_", in parts that "/"
/// separates; a name that exists throws ValueError. Thread safety: one thread at a time.
class Metrics {
 public:
  Metrics() = default;
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  Gauge& gauge(const std::string& name, AcrossRanks across);
  Counter& counter(const std::string& name, AcrossRanks across);
  /// Adds up counts over the ranks. `bounds` rise.
  Histogram& histogram(const std::string& name, std::vector<double> bounds);

  /// Returns this rank's values, in the order of registration.
  std::vector<MetricValue> read() const;
  /// Returns the values of all ranks by one all-gather; a gauge that some ranks did not set is theirs that did. The
  /// first call after a registration throws ValueError on every rank unless all registered the same.
  std::vector<MetricValue> reduce(const ProcessGroupPtr& group) const;

 private:
  struct Entry {
    std::string name;
    MetricKind kind;
    AcrossRanks across;
    size_t index;  // among those of its kind
  };
  void add(const std::string& name, MetricKind kind, AcrossRanks across, size_t index);
  std::vector<double> numbers() const;
  std::vector<MetricValue> from_numbers(const double* numbers) const;

  std::vector<Entry> entries_;
  mutable bool is_agreed_ = false;  // that the ranks registered the same
  std::deque<Gauge> gauges_;        // whose elements do not move
  std::deque<Counter> counters_;
  std::deque<Histogram> histograms_;
};

}  // namespace tessera
