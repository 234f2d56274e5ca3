#pragma once
// Diagnostics of a run: timelines of some steps (--trace), their memory (--memory-timeline), NaN
// (--check-numerics), and the links between ranks (--check-links).
//
//   StepWatch watch(*model, optimizer, options);
//   for (int64_t step = 1; step <= steps; ++step) {
//     watch.begin_step(step);
//     loss(model(batch)).backward();
//     watch.before_optimizer(step);
//     optimizer.step();
//     watch.end_step(step);
//   }
//
// docs/observability.md describes the output. All ranks make a StepWatch, and the same calls in the same order.

#include <cstdint>
#include <optional>
#include <string>

#include "debug/memory_timeline.h"
#include "debug/numerics_watch.h"
#include "debug/trace.h"

namespace CLI {
class App;
}

namespace tessera::examples {

/// The folders are absolute. If one is empty, its diagnostics are not written.
struct StepWatchOptions {
  TraceSteps::Options trace;
  MemoryTimelineSteps::Options memory;
  bool check_numerics = false;
  bool check_links = false;
};

/// Adds --trace, --trace-steps, --trace-ops, --memory-timeline, --memory-steps, --check-numerics and --check-links to a
/// group of a program's options.
void add_watch_options(CLI::App& app, StepWatchOptions& options, const std::string& group);
/// Makes the folders absolute.
void resolve_folders(StepWatchOptions& options);
/// Throws ValueError for steps beyond the run's end, and for a trace that begins within a timeline of memory, because
/// libtorch has one profiler per thread.
void check_watch_options(const StepWatchOptions& options, int64_t steps);
/// Throws ValueError for a folder that cannot be written to.
void check_folders(const StepWatchOptions& options);

/// Returns a line on the links between ranks, to print before the first step. Empty without --check-links. Collective.
std::string links_line(const StepWatchOptions& options, at::Device device);

class StepWatch {
 public:
  /// `model` and `optimizer` must outlive the StepWatch.
  StepWatch(ModuleRef model, torch::optim::Optimizer& optimizer, const StepWatchOptions& options);

  void begin_step(int64_t step);
  /// Throws Error on every rank if the step's activations or gradients have NaN or infinity.
  void before_optimizer(int64_t step);
  void end_step(int64_t step);

 private:
  TraceSteps trace_;
  MemoryTimelineSteps memory_;
  std::optional<NumericsWatch> numerics_;
};

}  // namespace tessera::examples
