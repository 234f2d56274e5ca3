#include "examples/train_gpt/progress_line.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include "base/error.h"
#include "comm/process_group.h"
#include "examples/train_gpt/model_flops.h"
#include "examples/train_gpt/peak_memory.h"
#include "examples/train_gpt/run_cost.h"

namespace tessera::examples {

void write_out(const std::string& text) {
  const bool is_written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0;
  TESSERA_CHECK(Error, is_written, "stdout cannot be written: {}", std::strerror(errno));
}

ProgressLine::ProgressLine(const TrainOptions& options)
    : steps_(options.steps),
      device_(options.layout.device),
      flops_per_token_of_rank_(training_flops_per_token(options.model) / get_world_size()),
      peak_tflops_(options.peak_tflops),
      in_place_(isatty(STDOUT_FILENO) != 0) {}

void ProgressLine::show(const Progress& progress) {
  const bool stays = progress.validation_loss.has_value() || progress.step >= next_line_;
  if (!in_place_ && !stays) {
    return;
  }
  std::string line = fmt::format(
      "step {:>{}}/{}  loss {:.3f}  {:.0f} tokens/s  {:.1f} ms/step  {:.2f} MB sent/step  "
      "peak {:.0f} MiB",
      progress.step, fmt::formatted_size("{}", steps_), steps_, progress.loss, progress.tokens_per_second,
      progress.ms_per_step, progress.mb_sent_per_step, peak_memory_bytes(device_) / kMebibyte);
  if (peak_tflops_) {
    const double flops = progress.tokens_per_second * flops_per_token_of_rank_;
    line += fmt::format("  MFU {:.1f} %", 100 * model_flops_utilization(flops, *peak_tflops_));
  }
  if (progress.validation_loss) {
    line += fmt::format("  validation {:.3f}", *progress.validation_loss);
  }
  if (in_place_) {
    write_out(fmt::format("\r\x1b[K{}{}", line, progress.validation_loss ? "\n" : ""));
  } else {
    write_out(line + "\n");
    next_line_ = progress.step - progress.step % std::max<int64_t>(1, steps_ / 10) + std::max<int64_t>(1, steps_ / 10);
  }
}

}  // namespace tessera::examples
