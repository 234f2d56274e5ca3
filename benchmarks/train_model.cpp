#include "benchmarks/train_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <c10/util/Exception.h>

#include "examples/gpt_model.h"
#include "fully_shard/fully_shard.h"
#include "nn/hooks/hooked.h"
#include "nn/linear.h"
#include "optim/fused_optimizers.h"

namespace tessera {

namespace {

constexpr int kTinyDim = 16;
constexpr int kTinyBlocks = 16;
constexpr int kTinyLayers = 6;  // each a weight and a bias

struct TinyBlockImpl : torch::nn::Module {
  TinyBlockImpl() {
    for (int i = 0; i < kTinyLayers; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), nn::Linear(kTinyDim, kTinyDim)));
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
TESSERA_MODULE(TinyBlock);

struct TinyImpl : torch::nn::Module {
  TinyImpl() {
    for (int i = 0; i < kTinyBlocks; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), TinyBlock()));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) {
      x = block(x);
    }
    return x;
  }

  std::vector<TinyBlock> blocks;
};
TESSERA_MODULE(Tiny);

template <class Holder>
TrainModel train_model(Holder& model, std::function<at::Tensor()> loss, int steps) {
  TrainModel result{.module = model.ptr(), .blocks = {}, .loss = std::move(loss), .steps = steps};
  for (auto& block : model->blocks) {
    result.blocks.push_back(block.ptr());
  }
  return result;
}

TrainModel make_tiny() {
  Tiny model;
  return train_model(
      model, [model, input = at::randn({4, kTinyDim})]() mutable { return model(input).sum(); }, /*steps=*/20);
}

TrainModel make_gpt(const examples::GptConfig& config, int64_t batch, int steps) {
  examples::Gpt model(config, /*seed=*/1);
  const auto bytes = at::randint(examples::kByteValues, {batch, config.context + 1}, at::kLong);
  const auto inputs = bytes.narrow(1, 0, config.context), targets = bytes.narrow(1, 1, config.context);
  return train_model(
      model, [=]() mutable { return examples::next_byte_loss(model(inputs), targets); }, steps);
}

}  // namespace

const std::vector<std::string>& train_model_sizes() {
  static const std::vector<std::string> sizes{"tiny", "256", "768"};
  return sizes;
}

TrainModel make_train_model(const std::string& size) {
  if (size == "256") {
    return make_gpt({.dim = 256, .layers = 4, .heads = 4, .context = 128}, /*batch=*/4, /*steps=*/4);
  }
  if (size == "768") {
    return make_gpt({.dim = 768, .layers = 8, .heads = 12, .context = 64}, /*batch=*/1, /*steps=*/2);
  }
  TORCH_CHECK(size == "tiny", "no model of size ", size);
  return make_tiny();
}

void shard(const TrainModel& model) {
  for (const auto& block : model.blocks) {
    fully_shard(block);
  }
  fully_shard(model.module);
}

std::function<void()> make_step(const TrainModel& model, Optimizer kind) {
  std::shared_ptr<optim::FusedAdamW> optimizer;
  if (kind == Optimizer::AdamW) {
    optimizer = std::make_shared<optim::FusedAdamW>(model.module->parameters(), torch::optim::AdamWOptions(1e-3));
  }
  return [model, optimizer] {
    model.module->zero_grad();
    model.loss().backward();
    if (optimizer) {
      optimizer->step();
    }
  };
}

}  // namespace tessera
