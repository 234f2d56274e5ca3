#include "examples/train_gpt/run_cost.h"

#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include "comm/collectives.h"
#include "comm/process_group.h"
#include "examples/train_gpt/model_flops.h"
#include "examples/train_gpt/peak_memory.h"

namespace tessera::examples {

namespace {

constexpr double kMega = 1e6;
constexpr double kGiga = 1e9;
constexpr double kTera = 1e12;

std::string speed_text(const RunCost& cost) {
  if (cost.tokens_per_second == 0) {
    return "training: all steps had been made before";
  }
  const double flops = cost.tokens_per_second * cost.flops_per_token;
  const double rank_flops = flops / cost.ranks;
  std::string text = fmt::format("training: {:.0f} tokens/s, {} of the model, {} a rank", cost.tokens_per_second,
                                 flops_text(flops), flops_text(rank_flops));
  if (cost.peak_tflops) {
    text += fmt::format(", MFU {:.1f} % of {} TFLOP/s", 100 * model_flops_utilization(rank_flops, *cost.peak_tflops),
                        *cost.peak_tflops);
  }
  return text;
}

}  // namespace

RunCost cost_of_run(const Trainer& trainer, const TrainOptions& options) {
  const TrainingTime& time = trainer.training_time();
  const c10::DeviceType device = options.layout.device;
  const at::Tensor largest = at::tensor({time.seconds, peak_memory_bytes(device)}, at::dtype(at::kDouble));
  all_reduce(largest, ReduceOp::Max, default_group());
  const auto tokens = static_cast<double>(time.steps * options.batch * options.model.context);
  return {.tokens_per_second = time.steps > 0 ? tokens / largest[0].item<double>() : 0,
          .flops_per_token = training_flops_per_token(options.model),
          .ranks = get_world_size(),
          .peak_memory_bytes = largest[1].item<double>(),
          .device = device,
          .peak_tflops = options.peak_tflops};
}

double model_flops_utilization(double flops_per_second, double peak_tflops) {
  return flops_per_second / (peak_tflops * kTera);
}

std::string flops_text(double flops_per_second) {
  if (flops_per_second < kGiga) {
    return fmt::format("{:.1f} MFLOP/s", flops_per_second / kMega);
  }
  return flops_per_second < kTera ? fmt::format("{:.1f} GFLOP/s", flops_per_second / kGiga)
                                  : fmt::format("{:.1f} TFLOP/s", flops_per_second / kTera);
}

std::string describe(const RunCost& cost) {
  return fmt::format("{}\npeak memory of a rank: {:.0f} MiB ({})", speed_text(cost), cost.peak_memory_bytes / kMebibyte,
                     peak_memory_kind(cost.device));
}

}  // namespace tessera::examples
