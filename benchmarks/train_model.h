#pragma once
// Models for measuring training steps, and their sharding.
//
//   tiny   16 blocks of 6 Linear(16, 16), 4 rows: many small parameters, dominated by overhead
//   256    the GPT of the examples, dim 256, 4 layers, 4 x 128 bytes per rank
//   768    the same with dim 768, 8 layers (218 MiB of parameters), 1 x 64 bytes per rank

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

struct TrainModel {
  std::shared_ptr<torch::nn::Module> module;
  /// Blocks, each of them a unit.
  std::vector<std::shared_ptr<torch::nn::Module>> blocks;
  /// Loss of a forward on this rank's data.
  std::function<at::Tensor()> loss;
  /// Number of steps in a round of measurement.
  int steps = 0;
};

const std::vector<std::string>& train_model_sizes();

/// Makes a model with equal parameters on all ranks.
TrainModel make_train_model(const std::string& size);

/// Applies fully_shard to the blocks and the module, over all ranks.
void shard(const TrainModel& model);

enum class Optimizer { None, AdamW };

/// Returns forward, backward, and the fused optimizer's step. Keeps the model alive.
std::function<void()> make_step(const TrainModel& model, Optimizer kind);

}  // namespace tessera
