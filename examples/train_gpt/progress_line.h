#pragma once
// Shows how training goes: a line that renews itself on a terminal, and a line every tenth of the way elsewhere.

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <optional>
#include <string>

#include "examples/train_gpt/train_options.h"
#include "examples/train_gpt/trainer.h"

namespace tessera::examples {

/// Writes to stdout at once. Throws Error if that cannot be done, as where it is closed or a disk is full.
void write_out(const std::string& text);

/// Writes to stdout. For rank 0.
class ProgressLine {
 public:
  /// For a run on all ranks of the default group. It shows the peak memory of rank 0, and MFU with options.peak_tflops.
  explicit ProgressLine(const TrainOptions& options);

  /// Validations get a line that stays.
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
