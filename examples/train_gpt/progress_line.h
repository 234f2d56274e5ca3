#pragma once
// Shows training progress: a line that is updated on a terminal, and ten lines in total elsewhere.

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <optional>
#include <string>

#include "examples/train_gpt/train_options.h"
#include "examples/train_gpt/trainer.h"

namespace tessera::examples {

/// Writes to stdout at once. Throws Error if that fails, such as for a closed stdout or a full disk.
void write_out(const std::string& text);

/// Writes to stdout. For rank 0.
class ProgressLine {
 public:
  /// Makes a line for a run on all ranks of the default group. It has rank 0's peak memory and, with
  /// options.peak_tflops, MFU.
  explicit ProgressLine(const TrainOptions& options);

  /// Prints validations on lines that stay.
  void show(const Progress& progress);

 private:
  int64_t steps_;
  c10::DeviceType device_;
  double flops_per_token_of_rank_;
  std::optional<double> peak_tflops_;
  bool in_place_;
  int64_t next_line_ = 0;
};

}  // namespace tessera::examples
