#pragma once
// Metrics of a training run in a folder (--log-dir): loss, throughput, time per part of the step, and bytes sent.
//
//   TrainingLog log({.target = {.folder = "logs"}, .mesh = mesh, .tokens_per_step = 4096, .peak_memory_bytes = peak});
//   for (int64_t step = 1; step <= steps; ++step) {
//     const auto batch = [&] { const auto timed = log.time(StepPart::Data); return next_batch(); }();
//     const double loss = train_step(batch);
//     log.after_step(step, {.loss = loss, .learning_rate = 1e-3});
//   }
//
// docs/observability.md lists the metrics. All ranks make a log, and the same calls in the same order. Rank 0 writes.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "debug/metrics.h"
#include "debug/metrics_log.h"
#include "debug/metrics_server.h"
#include "debug/step_meter.h"
#include "device_mesh/device_mesh.h"

namespace CLI {
class App;
}

namespace tessera::examples {

/// Destinations of metrics: a folder, and a server on rank 0. Both may be left out.
struct MetricsTarget {
  std::string folder;
  /// Steps between lines.
  int64_t every = 10;
  std::optional<int> port = std::nullopt;
  std::string host = "127.0.0.1";

  bool is_none() const { return folder.empty() && !port; }
};

struct TrainingLogOptions {
  MetricsTarget target;
  DeviceMesh mesh;
  int64_t tokens_per_step = 0;
  /// Rate at which model FLOPs utilization would be 1; without it, that is left out.
  std::optional<double> peak_tokens_per_second = std::nullopt;
  std::function<double()> peak_memory_bytes;
};

/// Equal on all ranks.
struct StepResult {
  double loss = 0;
  double learning_rate = 0;
  std::optional<double> gradient_norm = std::nullopt;
  /// Loss of a validation after the step, if there was one; the step then gets a line.
  std::optional<double> validation_loss = std::nullopt;
};

class TrainingLog {
 public:
  explicit TrainingLog(TrainingLogOptions options);

  [[nodiscard]] StepMeter::Scope time(StepPart part) { return meter_.time(part); }

  /// Ends step number `step`, counted from 1. Communicates where a line is due. Throws Error on rank 0 if the disk is
  /// full.
  void after_step(int64_t step, const StepResult& result);

 private:
  void set(const StepResult& result, const StepReport& report);

  struct Axis {
    std::string group;
    Gauge& bytes_sent;
  };

  TrainingLogOptions options_;
  Metrics metrics_;
  std::vector<Axis> axes_;
  std::unique_ptr<MetricsLog> log_;        // of rank 0
  std::unique_ptr<MetricsServer> server_;  // of rank 0
  StepMeter meter_;
  Gauge& loss_ = metrics_.gauge("train/loss", AcrossRanks::Mean);
  Gauge& validation_loss_ = metrics_.gauge("train/validation_loss", AcrossRanks::Mean);
  Gauge& learning_rate_ = metrics_.gauge("train/learning_rate", AcrossRanks::Mean);
  Gauge& gradient_norm_ = metrics_.gauge("train/gradient_norm", AcrossRanks::Mean);
  Counter& tokens_ = metrics_.counter("train/tokens", AcrossRanks::Max);
  Gauge& tokens_per_second_ = metrics_.gauge("train/tokens_per_second", AcrossRanks::Min);
  Gauge& utilization_ = metrics_.gauge("train/mfu", AcrossRanks::Min);
  Gauge& seconds_ = metrics_.gauge("step/seconds", AcrossRanks::Mean);
  Gauge& compute_ = metrics_.gauge("step/compute_seconds", AcrossRanks::Mean);
  Gauge& slowest_compute_ = metrics_.gauge("step/slowest_compute_seconds", AcrossRanks::Max);
  Gauge& communication_ = metrics_.gauge("step/communication_seconds", AcrossRanks::Mean);
  Gauge& data_ = metrics_.gauge("step/data_seconds", AcrossRanks::Mean);
  Gauge& checkpoint_ = metrics_.gauge("step/checkpoint_seconds", AcrossRanks::Mean);
  Gauge& peak_memory_ = metrics_.gauge("memory/peak_bytes", AcrossRanks::Max);
};

/// Times a part of the step where there is a log.
[[nodiscard]] inline StepMeter::Scope time_part(const std::unique_ptr<TrainingLog>& log, StepPart part) {
  return log ? log->time(part) : StepMeter::Scope();
}

/// Adds --log-dir, --log-every, --metrics-port and --metrics-host to a group of a program's options.
void add_log_options(CLI::App& app, MetricsTarget& target, const std::string& group);
/// Makes the folder absolute.
void resolve_folder(MetricsTarget& target);
/// Throws ValueError if the folder cannot be written to or the port cannot be served.
void check_target(const MetricsTarget& target);

}  // namespace tessera::examples
