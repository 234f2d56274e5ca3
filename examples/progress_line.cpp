#include "examples/progress_line.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>

namespace tessera::examples {

double peak_memory_mb() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "VmHWM:") {
      double kib = 0;
      status >> kib;
      return kib * 1024 / 1e6;
    }
  }
  return 0;
}

ProgressLine::ProgressLine(int64_t steps) : steps_(steps), in_place_(isatty(STDOUT_FILENO) != 0) {}

void ProgressLine::show(const Progress& progress) {
  const bool stays = progress.validation_loss.has_value() || progress.step >= next_line_;
  if (!in_place_ && !stays) {
    return;
  }
  std::string line = fmt::format(
      "step {:>{}}/{}  loss {:.3f}  {:.0f} tokens/s  {:.1f} ms/step  {:.2f} MB sent/step  "
      "peak {:.0f} MB a rank",
      progress.step, fmt::formatted_size("{}", steps_), steps_, progress.loss, progress.tokens_per_second,
      progress.ms_per_step, progress.mb_sent_per_step, peak_memory_mb());
  if (progress.validation_loss) {
    line += fmt::format("  validation {:.3f}", *progress.validation_loss);
  }
  if (in_place_) {
    fmt::print("\r\x1b[K{}{}", line, progress.validation_loss ? "\n" : "");
  } else {
    fmt::print("{}\n", line);
    next_line_ = progress.step - progress.step % std::max<int64_t>(1, steps_ / 10) + std::max<int64_t>(1, steps_ / 10);
  }
  std::fflush(stdout);
}

}  // namespace tessera::examples
