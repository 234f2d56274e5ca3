#include "examples/training/training_log.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <utility>

#include "base/error.h"
#include "comm/process_group.h"
#include "examples/training/data_path.h"

namespace tessera::examples {

namespace {

/// Token for requests from other hosts.
constexpr const char* kTokenVariable = "TESSERA_METRICS_TOKEN";

MetricsServer::Options server_options(const MetricsTarget& target) {
  const char* const token = std::getenv(kTokenVariable);
  return {.host = target.host, .port = *target.port, .token = token ? token : ""};
}

}  // namespace

TrainingLog::TrainingLog(TrainingLogOptions options) : options_(std::move(options)) {
  const auto& names = options_.mesh.axis_names();
  for (int64_t axis = 0; axis < options_.mesh.ndim(); ++axis) {
    if (options_.mesh.size(axis) > 1) {
      // An axis of all ranks has the default group, so its bytes include the program's other communication.
      axes_.push_back(
          {.group = group_name(options_.mesh.group(axis)),
           .bytes_sent = metrics_.gauge("comm/bytes_per_step/" + names[static_cast<size_t>(axis)], AcrossRanks::Sum)});
    }
  }
  if (get_rank() == 0) {
    log_ = options_.target.folder.empty() ? nullptr : std::make_unique<MetricsLog>(options_.target.folder);
    server_ = options_.target.port ? std::make_unique<MetricsServer>(server_options(options_.target)) : nullptr;
  }
}

void TrainingLog::set(const StepResult& result, const StepReport& report) {
  const auto set_optional = [](Gauge& gauge, const std::optional<double>& value) {
    value ? gauge.set(*value) : gauge.clear();
  };
  const double tokens_per_second = static_cast<double>(options_.tokens_per_step) / report.seconds;
  loss_.set(result.loss);
  set_optional(validation_loss_, result.validation_loss);
  learning_rate_.set(result.learning_rate);
  set_optional(gradient_norm_, result.gradient_norm);
  tokens_.add(static_cast<double>(report.steps * options_.tokens_per_step));
  tokens_per_second_.set(tokens_per_second);
  if (options_.peak_tokens_per_second) {
    utilization_.set(tokens_per_second / *options_.peak_tokens_per_second);
  }
  seconds_.set(report.seconds);
  compute_.set(report.compute);
  slowest_compute_.set(report.compute);
  communication_.set(report.communication);
  data_.set(report.data);
  checkpoint_.set(report.checkpoint);
  peak_memory_.set(options_.peak_memory_bytes());
  for (const auto& axis : axes_) {
    const auto found = report.bytes_sent.find(axis.group);
    axis.bytes_sent.set(found == report.bytes_sent.end() ? 0 : found->second);
  }
}

void TrainingLog::after_step(int64_t step, const StepResult& result) {
  meter_.end_step();
  if (step % options_.target.every != 0 && !result.validation_loss) {
    return;
  }
  set(result, meter_.read());
  const auto unmetered = meter_.time(StepPart::Unmetered);
  const auto values = metrics_.reduce(default_group());
  if (log_) {
    log_->write(step, values);
  }
  if (server_) {
    server_->set(prometheus_text(values));
  }
}

void add_log_options(CLI::App& app, MetricsTarget& target, const std::string& group) {
  app.add_option("--log-dir", target.folder,
                 "where metrics go, for TensorBoard, scripts and Prometheus; default: nowhere")
      ->group(group)
      ->type_name("FOLDER");
  app.add_option("--log-every", target.every, "steps between two lines of metrics")
      ->capture_default_str()
      ->group(group);
  app.add_option("--metrics-port", target.port,
                 "where rank 0 serves them at /metrics, for Prometheus; 0: at a free port; default: nowhere")
      ->group(group);
  app.add_option("--metrics-host", target.host,
                 "address of it; requests to others than this host's own need the token of TESSERA_METRICS_TOKEN")
      ->capture_default_str()
      ->group(group);
}

void resolve_folder(MetricsTarget& target) {
  target.folder = target.folder.empty() ? "" : path_from_caller(target.folder);
}

void check_target(const MetricsTarget& target) {
  if (!target.folder.empty()) {
    check_writable_folder("--log-dir", target.folder);
  }
  if (target.port) {
    MetricsServer::check(server_options(target));
  }
}

}  // namespace tessera::examples
