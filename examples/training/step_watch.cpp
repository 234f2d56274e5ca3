#include "examples/training/step_watch.h"

#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include <CLI/CLI.hpp>

#include "base/error.h"
#include "comm/process_group.h"
#include "debug/link_rates.h"
#include "examples/training/data_path.h"

namespace tessera::examples {

namespace {

MemoryTimelineSteps::Options with_optimizer(MemoryTimelineSteps::Options options, torch::optim::Optimizer& optimizer) {
  options.optimizer = &optimizer;
  return options;
}

void add_steps(CLI::App& app, const std::string& name, StepRange& steps, const std::string& group) {
  app.add_option_function<std::string>(
         name, [name, &steps](const std::string& text) { steps = parse_step_range(name, text); },
         "which steps these are")
      ->group(group)
      ->type_name("FIRST-LAST")
      ->default_str("10-12");
}

}  // namespace

void add_watch_options(CLI::App& app, StepWatchOptions& options, const std::string& group) {
  app.add_flag("--check-numerics", options.check_numerics,
               "end the run before a step whose activations or gradients have NaN or infinity, and name\n"
               "the first module and its rank")
      ->group(group);
  app.add_flag("--check-links", options.check_links,
               "measure how fast each rank's messages reach each other one, and name slow links")
      ->group(group);
  app.add_option("--trace", options.trace.folder,
                 "where a timeline of some steps goes, for tools/merge_traces; default: nowhere")
      ->group(group)
      ->type_name("FOLDER");
  add_steps(app, "--trace-steps", options.trace.steps, group);
  app.add_flag("--trace-ops", options.trace.ops,
               "put ATen's ops and autograd's nodes into it: larger, and it slows the steps more")
      ->group(group);
  app.add_option("--memory-timeline", options.memory.folder,
                 "where a timeline of the memory in some steps goes, with what is alive at its peak;\n"
                 "default: nowhere")
      ->group(group)
      ->type_name("FOLDER");
  add_steps(app, "--memory-steps", options.memory.steps, group);
}

void resolve_folders(StepWatchOptions& options) {
  for (auto* folder : {&options.trace.folder, &options.memory.folder}) {
    *folder = folder->empty() ? "" : path_from_caller(*folder);
  }
}

void check_watch_options(const StepWatchOptions& options, int64_t steps) {
  const auto check = [steps](const char* option, const std::string& folder, const StepRange& range) {
    TESSERA_CHECK(ValueError, folder.empty() || range.last <= steps, "{} {}-{}: the run has {} steps", option,
                  range.first, range.last, steps);
  };
  check("--trace-steps", options.trace.folder, options.trace.steps);
  check("--memory-steps", options.memory.folder, options.memory.steps);
  const auto &trace = options.trace.steps, &memory = options.memory.steps;
  TESSERA_CHECK(ValueError,
                options.trace.folder.empty() || options.memory.folder.empty() || trace.first <= memory.first ||
                    trace.first > memory.last,
                "--trace-steps {}-{}: cannot begin within --memory-steps {}-{}; begin before them, or after",
                trace.first, trace.last, memory.first, memory.last);
}

void check_folders(const StepWatchOptions& options) {
  if (!options.trace.folder.empty()) {
    check_writable_folder("--trace", options.trace.folder);
  }
  if (!options.memory.folder.empty()) {
    check_writable_folder("--memory-timeline", options.memory.folder);
  }
}

std::string links_line(const StepWatchOptions& options, at::Device device) {
  return options.check_links ? "links: " + describe(measure_links(default_group(), {.device = device})) : "";
}

StepWatch::StepWatch(ModuleRef model, torch::optim::Optimizer& optimizer, const StepWatchOptions& options)
    : trace_(model, options.trace), memory_(model, with_optimizer(options.memory, optimizer)) {
  if (options.check_numerics) {
    numerics_.emplace(model);
  }
}

void StepWatch::begin_step(int64_t step) {
  trace_.begin_step(step);
  memory_.begin_step(step);
}

void StepWatch::before_optimizer(int64_t step) {
  if (numerics_) {
    if (const auto found = numerics_->check(step)) {
      throw Error(fmt::format("--check-numerics: {}; the parameters are those before this step", to_string(*found)));
    }
  }
}

void StepWatch::end_step(int64_t step) {
  memory_.end_step(step);
  trace_.end_step(step);
}

}  // namespace tessera::examples
