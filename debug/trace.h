#pragma once
// Trace: records a timeline of a rank's steps for Perfetto (https://ui.perfetto.dev) or chrome://tracing.
//
//   TraceSteps trace(*model, {.folder = "traces", .steps = {10, 12}});
//   for (int64_t step = 1; step <= steps; ++step) {
//     trace.begin_step(step);
//     train_step();
//     trace.end_step(step);               // after step 12: traces/rank-0.json
//   }
//   // tools/merge_traces traces            merges all ranks, on one clock, into traces/trace.json
//
// A file contains:
// - steps, forwards of modules, redistributions with their placements, and phases of checkpoints.
// - each collective where it is issued and where it is waited for, with its bytes, group and unit.
// - spans apart from the threads: collectives, gathers, backwards and reductions of units in flight.
// - on request, ATen's ops and autograd's nodes on all threads, recorded by libtorch's profiler (Kineto).
// - a GPU's kernels, always.

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

/// Records from construction to stop(). Replaces event observers of fully_shard units (FSDPModule). Only one may exist
/// in a process, so ranks that are threads cannot be traced. Thread safety: for the rank's thread.
class Trace {
 public:
  struct Options {
    std::string folder = {};  // created if needed; an existing trace in it is replaced
    bool ops = false;         // includes ATen's ops and autograd's nodes: larger files, slower steps
  };

  /// Measures clock offsets between ranks. Collective over the default group, if there is one. `model` must outlive
  /// stop(). Throws StateError on every rank if ranks are threads, and if this process has a trace or the thread has a
  /// MemoryTimeline.
  Trace(ModuleRef model, Options options);
  ~Trace();  // without a preceding stop(), writes nothing
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  /// Writes the file. Throws Error on failure.
  void stop();

 private:
  class Recording;
  std::unique_ptr<Recording> recording_;
};

/// Traces a range of steps. Costs one comparison in other steps.
class TraceSteps {
 public:
  struct Options {
    std::string folder = {};  // empty: trace nothing
    StepRange steps = {};
    bool ops = false;  // see Trace::Options
  };

  /// Throws ValueError like check_step_range(). `model` must outlive the traced steps.
  TraceSteps(ModuleRef model, Options options);
  ~TraceSteps();
  TraceSteps(const TraceSteps&) = delete;
  TraceSteps& operator=(const TraceSteps&) = delete;

  void begin_step(int64_t step);  // collective at the first traced step
  void end_step(int64_t step);

 private:
  ModuleRef model_;
  Options options_;
  std::optional<Trace> trace_;
  std::unique_ptr<at::RecordFunction> step_;  // range of the running step
};

}  // namespace tessera
