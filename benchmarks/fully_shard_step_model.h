#pragma once
// The model of fully_shard_step: many small parameters.

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "nn/hooked.h"
#include "nn/linear.h"

namespace tessera {

inline constexpr int kStepDim = 16;
inline constexpr int kStepBlocks = 16;
inline constexpr int kStepLayers = 6;  // each a weight and a bias

struct StepBlockImpl : torch::nn::Module {
  StepBlockImpl() {
    for (int i = 0; i < kStepLayers; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), nn::Linear(kStepDim, kStepDim)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) {
      x = layer(x);
    }
    return x;
  }

  std::vector<nn::Linear> layers;
};
TESSERA_MODULE(StepBlock);

struct StepModelImpl : torch::nn::Module {
  StepModelImpl() {
    for (int i = 0; i < kStepBlocks; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), StepBlock()));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) {
      x = block(x);
    }
    return x;
  }

  std::vector<StepBlock> blocks;
};
TESSERA_MODULE(StepModel);

}  // namespace tessera
