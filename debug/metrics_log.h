#pragma once
// MetricsLog: writes a run's metrics to a folder for TensorBoard, scripts and Prometheus.
//
//   metrics.jsonl           {"step": 10, "time": 1764374400.5, "train/loss": 2.5, ...}, one line per write
//   events.out.tfevents.*   the same data; `tensorboard --logdir logs`
//   metrics.prom            the last write in Prometheus' text format, for node_exporter's textfile collector
//
// In metrics.jsonl, a histogram is {"bounds": [...], "counts": [...], "sum": ...}, and NaN and infinity are null.

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "debug/event_file.h"
#include "debug/metrics.h"

namespace tessera {

/// Writes the files. In an existing folder, it appends lines and adds an event file. Thread safety: one thread at a
/// time.
class MetricsLog {
 public:
  /// Creates the folder if needed. Throws Error if it cannot be written.
  explicit MetricsLog(const std::string& folder);

  /// Writes the values of a step; they are complete on return. Throws Error if the disk is full.
  void write(int64_t step, const std::vector<MetricValue>& values);

 private:
  void replace_prometheus_file(const std::string& text) const;

  std::string folder_;
  std::ofstream lines_;
  EventFile events_;
};

/// Returns values in Prometheus' text format: "train/loss" becomes tessera_train_loss.
std::string prometheus_text(const std::vector<MetricValue>& values);

/// Returns a line of metrics.jsonl, without the newline.
std::string json_line(int64_t step, double time, const std::vector<MetricValue>& values);

}  // namespace tessera
