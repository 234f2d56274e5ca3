#pragma once
// Shows how training goes: a line that renews itself on a terminal, and a line every tenth of the way elsewhere.

#include <cstdint>

#include "examples/trainer.h"

namespace tessera::examples {

/// The most memory that this process has had in RAM so far, in MB (10^6 bytes); Linux's VmHWM.
double peak_memory_mb();

/// Writes to stdout. For rank 0.
class ProgressLine {
 public:
  explicit ProgressLine(int64_t steps);

  /// Validations get a line that stays.
  void show(const Progress& progress);

 private:
  int64_t steps_;
  bool in_place_;
  int64_t next_line_ = 0;
};

}  // namespace tessera::examples
