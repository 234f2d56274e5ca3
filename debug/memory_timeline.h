#pragma once
// MemoryTimeline: what memory is alive over some steps of a rank, and what it is for.
//
//   MemoryTimelineSteps memory(*model, {.folder = "memory", .steps = {10, 12}, .optimizer = &optimizer});
//   for (int64_t step = 1; step <= steps; ++step) {
//     memory.begin_step(step);
//     train_step();
//     memory.end_step(step);      // after step 12: memory/memory-rank-0.svg, .txt and .pickle (debug/memory_files.h)
//   }
//
// It counts what libtorch's allocator on the model's device (CPU or CUDA) gives to the rank's thread and to backward,
// and, of what there was before, the tensors of model and optimizer. What another thread frees on the CPU counts until
// its address is used again.

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

/// Records from construction to stop(). Thread safety: for the rank's thread, which makes and destroys it.
class MemoryTimeline {
 public:
  struct Options {
    torch::optim::Optimizer* optimizer = nullptr;  // whose state is to be told from other memory
  };

  /// `model` and the optimizer must outlive it. Throws StateError where the thread has another timeline, or a
  /// profiler of libtorch's (a Trace does no harm that began before), and NotImplementedError for an optimizer that
  /// optim/optimizer_fields.h does not know.
  MemoryTimeline(ModuleRef model, Options options);
  ~MemoryTimeline();
  MemoryTimeline(const MemoryTimeline&) = delete;
  MemoryTimeline& operator=(const MemoryTimeline&) = delete;

  void end_step(int64_t step);

  /// Ends it. Once.
  MemoryRecord stop();

 private:
  class Recorder;
  class Recording;
  std::unique_ptr<Recording> recording_;
};

/// A timeline of the steps from one to another, written when these are done. Costs a comparison outside of them.
class MemoryTimelineSteps {
 public:
  struct Options {
    std::string folder = {};  // empty: nothing is recorded
    StepRange steps = {};
    torch::optim::Optimizer* optimizer = nullptr;  // as MemoryTimeline::Options
  };

  /// Throws ValueError as check_step_range(). `model` and the optimizer must outlive the recorded steps.
  MemoryTimelineSteps(ModuleRef model, Options options);

  void begin_step(int64_t step);
  void end_step(int64_t step);

 private:
  ModuleRef model_;
  Options options_;
  std::optional<MemoryTimeline> timeline_;
};

}  // namespace tessera
