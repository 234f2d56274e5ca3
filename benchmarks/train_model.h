#pragma once
// The models of which the benchmarks measure training steps, and how they are sharded.
//
//   tiny   16 blocks of 6 Linear(16, 16), 4 rows: many small parameters, where overhead is all there is
//   256    the GPT of the examples, dim 256, 4 layers, 4 x 128 bytes a rank
//   768    the same with dim 768, 8 layers (218 MiB of parameters), 1 x 64 bytes a rank

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

struct TrainModel {
  std::shared_ptr<torch::nn::Module> module;
  /// Its blocks, each a unit of communication.
  std::vector<std::shared_ptr<torch::nn::Module>> blocks;
  /// Of a forward on this rank's data.
  std::function<at::Tensor()> loss;
  /// How many steps make a round of measuring.
  int steps = 0;
};

const std::vector<std::string>& train_model_sizes();

/// The same parameters for every rank.
TrainModel make_train_model(const std::string& size);

/// fully_shard on the blocks and the module, over all ranks.
void shard(const TrainModel& model);

enum class Optimizer { None, AdamW };

/// Forward and backward, and the step of the fused optimizer. It keeps the model alive.
std::function<void()> make_step(const TrainModel& model, Optimizer kind);

}  // namespace tessera
