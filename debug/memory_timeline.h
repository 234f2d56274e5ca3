#pragma once
// MemoryTimeline: records a rank's live memory and its purpose over some steps.
//
//   MemoryTimelineSteps memory(*model, {.folder = "memory", .steps = {10, 12}, .optimizer = &optimizer});
//   for (int64_t step = 1; step <= steps; ++step) {
//     memory.begin_step(step);
//     train_step();
//     memory.end_step(step);      // after step 12: memory/memory-rank-0.svg, .txt and .pickle (debug/memory_files.h)
//   }
//
// It counts allocations by libtorch's allocator on the model's device (CPU or CUDA) in the rank's thread and in
// backward. Of earlier memory, it counts the tensors of the model and the optimizer. Memory that another thread frees
// on the CPU counts as alive until its address is reused.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "debug/memory_record.h"
#include "debug/step_range.h"
#include "nn/hooks/module_ref.h"

namespace torch::optim {
class Optimizer;
}

namespace tessera {

/// Records from construction to stop(). Thread safety: for the rank's thread, which must create and destroy it.
class MemoryTimeline {
 public:
  struct Options {
    torch::optim::Optimizer* optimizer = nullptr;  // recorded under its own category
  };

  /// Starts recording. `model` and the optimizer must outlive it. Throws StateError if the thread already has a
  /// timeline or a libtorch profiler (a Trace that began earlier is allowed), and NotImplementedError for an optimizer
  /// that optim/optimizer_fields.h does not support.
  MemoryTimeline(ModuleRef model, Options options);
  ~MemoryTimeline();
  MemoryTimeline(const MemoryTimeline&) = delete;
  MemoryTimeline& operator=(const MemoryTimeline&) = delete;

  void end_step(int64_t step);

  /// Stops recording and returns the record. Call it once.
  MemoryRecord stop();

 private:
  class Recorder;
  class Recording;
  std::unique_ptr<Recording> recording_;
};

/// Timeline over a range of steps, written after the last of them. Costs one comparison in other steps.
class MemoryTimelineSteps {
 public:
  struct Options {
    std::string folder = {};  // empty: record nothing
    StepRange steps = {};
    torch::optim::Optimizer* optimizer = nullptr;  // see MemoryTimeline::Options
  };

  /// Throws ValueError like check_step_range(). `model` and the optimizer must outlive the recorded steps.
  MemoryTimelineSteps(ModuleRef model, Options options);

  void begin_step(int64_t step);
  void end_step(int64_t step);

 private:
  ModuleRef model_;
  Options options_;
  std::optional<MemoryTimeline> timeline_;
};

}  // namespace tessera
