#pragma once
// Cost of a training run over all ranks: speed, arithmetic and memory.
//
//   training: 6340 tokens/s, 31.7 GFLOP/s of the model, 15.9 GFLOP/s a rank, MFU 21.1 % of 0.075 TFLOP/s
//   peak memory of a rank: 612 MiB (resident)

#include <c10/core/DeviceType.h>

#include <optional>
#include <string>

#include "examples/train_gpt/train_options.h"
#include "examples/train_gpt/trainer.h"

namespace tessera::examples {

struct RunCost {
  /// Rate over all ranks in training steps; 0 without any.
  double tokens_per_second = 0;
  /// Arithmetic of the model (examples/train_gpt/model_flops.h).
  double flops_per_token = 0;
  int ranks = 1;
  /// Peak of the rank with most memory.
  double peak_memory_bytes = 0;
  c10::DeviceType device = c10::DeviceType::CPU;
  /// Maximum rate of a rank's device; without it, MFU is unknown.
  std::optional<double> peak_tflops = std::nullopt;
};

/// Returns the cost of this process's steps of `trainer`, by the time of the slowest rank, and memory so far. All ranks
/// of the default group must call it, and get the same.
RunCost cost_of_run(const Trainer& trainer, const TrainOptions& options);

/// Returns model FLOPs utilization, from 0 to 1: `flops_per_second` relative to `peak_tflops`, both of one rank. Pure.
double model_flops_utilization(double flops_per_second, double peak_tflops);

/// Returns "67.6 MFLOP/s", "31.7 GFLOP/s" or "412.0 TFLOP/s". Pure.
std::string flops_text(double flops_per_second);

/// Returns the lines above. Pure.
std::string describe(const RunCost& cost);

}  // namespace tessera::examples
