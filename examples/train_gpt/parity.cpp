#include "examples/train_gpt/parity.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/process_group.h"

namespace tessera::examples {

namespace {

// Returns the larger value, or NaN if either is NaN, which std::max would ignore.
double larger(double a, double b) {
  return std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b);
}

double loss_difference(const std::vector<LossPoint>& a, const std::vector<LossPoint>& b) {
  TESSERA_ASSERT(a.size() == b.size(), "{} losses against {}", a.size(), b.size());
  double difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = larger(difference, std::abs(a[i].loss - b[i].loss));
  }
  return difference;
}

}  // namespace

Parity allowed_parity(bool bf16) {
  return bf16 ? Parity{.max_loss_difference = 1e-2, .max_parameter_difference = 1e-1}
              : Parity{.max_loss_difference = 1e-4, .max_parameter_difference = 1e-3};
}

bool is_within(const Parity& parity, const Parity& allowed) {
  return parity.max_loss_difference <= allowed.max_loss_difference &&
         parity.max_parameter_difference <= allowed.max_parameter_difference;
}

Parity compare_with_one_process(Trainer& trainer, const TrainOptions& options, const ByteData& data) {
  const auto parameters = full_parameters(*trainer.model());
  std::optional<DeviceMesh> own_mesh;
  if (options.layout.bf16) {
    own_mesh = init_device_mesh(options.layout.device, {get_world_size(), 1}, {"ranks", "dp"})["dp"];
  }
  Parity parity;
  if (get_rank() == 0) {
    TrainOptions plain = options;
    plain.layout.meta_init = false;
    Trainer reference(plain, data, Layout::single(trainer.layout().slices, own_mesh));
    reference.run([](const Progress&) {});
    parity.max_loss_difference = larger(loss_difference(trainer.history().train, reference.history().train),
                                        loss_difference(trainer.history().validation, reference.history().validation));
    const auto expected = full_parameters(*reference.model());
    for (size_t i = 0; i < expected.size(); ++i) {
      TESSERA_ASSERT(parameters[i].first == expected[i].first, "{} against {}", parameters[i].first, expected[i].first);
      parity.max_parameter_difference = larger(parity.max_parameter_difference,
                                               (parameters[i].second - expected[i].second).abs().max().item<double>());
    }
  }
  const at::Tensor answer =
      at::tensor({parity.max_loss_difference, parity.max_parameter_difference}, at::dtype(at::kDouble));
  broadcast(answer, 0, default_group());
  return {.max_loss_difference = answer[0].item<double>(), .max_parameter_difference = answer[1].item<double>()};
}

}  // namespace tessera::examples
