#include "examples/training_log.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <utility>

#include "base/error.h"
#include "comm/process_group.h"

namespace tessera::examples {

TrainingLog::TrainingLog(TrainingLogOptions options) : options_(std::move(options)) {
  const auto& names = options_.mesh.axis_names();
  for (int64_t axis = 0; axis < options_.mesh.ndim(); ++axis) {
    if (options_.mesh.size(axis) > 1) {
      // An axis of all ranks has the default group, in which the program sends the rest, too.
      axes_.push_back(
          {.group = group_name(options_.mesh.group(axis)),
           .bytes_sent = metrics_.gauge("comm/bytes_per_step/" + names[static_cast<size_t>(axis)], AcrossRanks::Sum)});
    }
  }
  if (get_rank() == 0) {
    log_ = std::make_unique<MetricsLog>(options_.folder);
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
  if (step % options_.every != 0 && !result.validation_loss) {
    return;
  }
  set(result, meter_.read());
  const auto unmetered = meter_.time(StepPart::Unmetered);
  const auto values = metrics_.reduce(default_group());
  if (log_) {
    log_->write(step, values);
  }
}

void add_log_options(CLI::App& app, std::string& folder, int64_t& every, const std::string& group) {
  app.add_option("--log-dir", folder, "where metrics go, for TensorBoard, scripts and Prometheus; default: nowhere")
      ->group(group)
      ->type_name("FOLDER");
  app.add_option("--log-every", every, "steps between two lines of metrics")->capture_default_str()->group(group);
}

void add_numerics_option(CLI::App& app, bool& check_numerics, const std::string& group) {
  app.add_flag("--check-numerics", check_numerics,
               "end the run before a step whose activations or gradients have NaN or infinity, and name\n"
               "the first module and its rank")
      ->group(group);
}

void check_numerics(NumericsWatch& watch, int64_t step) {
  if (const auto found = watch.check(step)) {
    throw Error(fmt::format("--check-numerics: {}; the parameters are those before this step", to_string(*found)));
  }
}

void add_trace_options(CLI::App& app, TraceSteps::Options& trace, const std::string& group) {
  app.add_option("--trace", trace.folder,
                 "where a timeline of some steps goes, for tools/merge_traces; default: nowhere")
      ->group(group)
      ->type_name("FOLDER");
  app.add_option_function<std::string>(
         "--trace-steps",
         [&trace](const std::string& text) {
           const auto steps = parse_trace_steps("--trace-steps", text);
           trace.first_step = steps.first_step;
           trace.last_step = steps.last_step;
         },
         "steps of the timeline")
      ->group(group)
      ->type_name("FIRST-LAST")
      ->default_str("10-12");
  app.add_flag(
         "--trace-no-ops", [&trace](int64_t) { trace.ops = false; },
         "leave ATen's ops and autograd's nodes out of it: smaller, and it slows the steps less")
      ->group(group);
}

}  // namespace tessera::examples
