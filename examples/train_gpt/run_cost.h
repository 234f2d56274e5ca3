#pragma once
// What a training run cost: speed, arithmetic and memory, over all ranks.
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
  /// Over all ranks, in training steps; 0 where this run made none.
  double tokens_per_second = 0;
  /// Of the model (examples/train_gpt/model_flops.h).
  double flops_per_token = 0;
  int ranks = 1;
  /// Of the rank that had most.
  double peak_memory_bytes = 0;
  c10::DeviceType device = c10::DeviceType::CPU;
  /// What a rank's device can do at most; none: MFU is not known.
  std::optional<double> peak_tflops = std::nullopt;
};

/// Of the steps that `trainer` has made in this process, by the time of its slowest rank; memory up to now. Collective:
/// every rank of the default group calls it and gets the same.
RunCost cost_of_run(const Trainer& trainer, const TrainOptions& options);

/// The share of `peak_tflops` that arithmetic of the model takes, from 0 to 1: model FLOPs utilization, with
/// `flops_per_second` and `peak_tflops` of one rank. Pure.
double model_flops_utilization(double flops_per_second, double peak_tflops);

/// "67.6 MFLOP/s", "31.7 GFLOP/s", "412.0 TFLOP/s". Pure.
std::string flops_text(double flops_per_second);

/// The lines above. Pure.
std::string describe(const RunCost& cost);

}  // namespace tessera::examples
