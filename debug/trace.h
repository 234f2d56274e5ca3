#pragma once
// Trace: a timeline of some steps of a rank, for Perfetto (https://ui.perfetto.dev) or chrome://tracing.
//
//   TraceSteps trace(*model, {.folder = "traces", .steps = {10, 12}});
//   for (int64_t step = 1; step <= steps; ++step) {
//     trace.begin_step(step);
//     train_step();
//     trace.end_step(step);               // after step 12: traces/rank-0.json
//   }
//   // tools/merge_traces traces            makes traces/trace.json of all ranks, on one clock
//
// A file has steps; forwards of modules; redistributions with their placements; phases of checkpoints; each collective
// where it is issued and where it is waited for, with its bytes, group and unit; and, as spans beside the threads, what
// is in flight: collectives, gathers of units, their backwards, and their reductions. If asked for, it has ATen's ops
// and autograd's nodes, too, as libtorch's profiler (Kineto) records them on all threads. A GPU's kernels are always
// there.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "debug/step_range.h"
#include "nn/hooks/module_ref.h"

namespace at {
struct RecordFunction;
}

namespace tessera {

/// Records from construction to stop(). It replaces event observers of fully_shard's units (FSDPModule). One in a
/// process at a time: ranks that are threads cannot be traced. Thread safety: for the rank's thread.
class Trace {
 public:
  struct Options {
    std::string folder = {};  // made if there is none; a file in it is replaced
    bool ops = false;         // with ATen's ops and autograd's nodes, which make it large and slow the steps more
  };

  /// Collective over the default group, if there is one: measures the offsets of the ranks' clocks. `model` must
  /// outlive stop(). Throws StateError on every rank if ranks are threads, and where this process has a trace,
  /// or the thread a MemoryTimeline.
  Trace(ModuleRef model, Options options);
  ~Trace();  // without stop(), writes nothing
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  /// Writes the file. Throws Error if that fails.
  void stop();

 private:
  class Recording;
  std::unique_ptr<Recording> recording_;
};

/// Traces the steps from one to another. Costs a comparison outside of them.
class TraceSteps {
 public:
  struct Options {
    std::string folder = {};  // empty: nothing is traced
    StepRange steps = {};
    bool ops = false;  // as Trace::Options
  };

  /// Throws ValueError as check_step_range(). `model` must outlive the traced steps.
  TraceSteps(ModuleRef model, Options options);
  ~TraceSteps();
  TraceSteps(const TraceSteps&) = delete;
  TraceSteps& operator=(const TraceSteps&) = delete;

  void begin_step(int64_t step);  // collective at the first step
  void end_step(int64_t step);

 private:
  ModuleRef model_;
  Options options_;
  std::optional<Trace> trace_;
  std::unique_ptr<at::RecordFunction> step_;  // the range of the step that runs
};

}  // namespace tessera
