#pragma once
// MetricsLog: a folder with the metrics of a run, for TensorBoard, for scripts and for Prometheus.
//
//   metrics.jsonl           {"step": 10, "time": 1764374400.5, "train/loss": 2.5, ...}, a line a write
//   events.out.tfevents.*   the same; `tensorboard --logdir logs`
//   metrics.prom            the last write, in Prometheus' text form: node_exporter's textfile collector serves it
//
// In the first, a histogram is {"bounds": [...], "counts": [...], "sum": ...}, and NaN and infinity are null.

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "debug/event_file.h"
#include "debug/metrics.h"

namespace tessera {

/// Writes the files; a folder that has some gets more lines and another event file. Thread safety: one thread at a
/// time.
class MetricsLog {
 public:
  /// Makes the folder if there is none. Throws Error if it cannot be written.
  explicit MetricsLog(const std::string& folder);

  /// Writes the values of a step, complete on return. Throws Error if the disk is full.
  void write(int64_t step, const std::vector<MetricValue>& values);

 private:
  void replace_prometheus_file(const std::string& text) const;

  std::string folder_;
  std::ofstream lines_;
  EventFile events_;
};

/// Returns values in Prometheus' text form: "train/loss" is tessera_train_loss.
std::string prometheus_text(const std::vector<MetricValue>& values);

/// Returns a line of metrics.jsonl, without its end.
std::string json_line(int64_t step, double time, const std::vector<MetricValue>& values);

}  // namespace tessera
