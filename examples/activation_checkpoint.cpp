// Activation checkpointing: backward recomputes activations instead of keeping them.
// `./bazelw run //examples:activation_checkpoint`
//
// A stack of blocks in one process, with and without checkpointing: equal gradients for a fraction of the memory.

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/randn.h>
#include <fmt/format.h>
#include <malloc.h>
#include <torch/utils.h>

#include "activation_checkpoint/checkpoint.h"
#include "nn/linear.h"
#include "nn/sequential.h"

using namespace tessera;

namespace {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t dim) {
    up = register_module("up", nn::Linear(dim, 4 * dim));
    down = register_module("down", nn::Linear(4 * dim, dim));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(x))); }

  nn::Linear up{nullptr}, down{nullptr};
};
TESSERA_MODULE(Block);

nn::Sequential make_model() {
  torch::manual_seed(0);
  nn::Sequential model;
  for (int i = 0; i < 8; ++i) {
    model->push_back("block" + std::to_string(i), Block(64));
  }
  return model;
}

/// Returns the memory that this process has allocated, in MB.
double memory_in_use() {
  const auto info = mallinfo2();
  return static_cast<double>(info.uordblks + info.hblkhd) / 1e6;
}

/// Returns the gradients after one backward. Prints the memory that forward leaves allocated for it.
std::vector<at::Tensor> run(nn::Sequential model, const char* what) {
  torch::manual_seed(1);
  const at::Tensor x = at::randn({4000, 64});
  const double before = memory_in_use();
  const at::Tensor loss = model(x).square().mean();
  fmt::print("{:<22} forward keeps {:.0f} MB\n", what, memory_in_use() - before);
  loss.backward();
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : model->parameters()) {
    gradients.push_back(parameter.grad());
  }
  return gradients;
}

}  // namespace

int main() {
  nn::Sequential checkpointed = make_model();
  const auto is_block = [](const std::string&, torch::nn::Module& module) {
    return dynamic_cast<BlockImpl*>(&module) != nullptr;
  };
  fmt::print("{} blocks are computed again in backward\n", apply_activation_checkpointing(*checkpointed, is_block));
  const auto recomputed = run(checkpointed, "with checkpointing:");
  const auto kept = run(make_model(), "without:");
  for (size_t i = 0; i < kept.size(); ++i) {
    if (!at::equal(kept[i], recomputed[i])) {
      fmt::print("gradient {} differs\n", i);
      return 1;
    }
  }
  fmt::print("all {} gradients are equal, bit for bit\n", kept.size());
  return 0;
}
