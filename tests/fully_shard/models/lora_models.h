#pragma once
// Models of which most is frozen, in another dtype than what is trained: bfloat16 weights and bytes beside float32
// adapters.

#include <torch/nn/module.h>

#include <vector>

#include "device_mesh/device_mesh.h"
#include "nn/hooks/hooked.h"
#include "nn/linear.h"

namespace tessera::testing {

/// x W' + (x A') B', with W frozen in bfloat16, and A, B of rank `adapter` in float32.
struct LoraLinearImpl : torch::nn::Module {
  LoraLinearImpl(int64_t in, int64_t out, int64_t adapter);
  at::Tensor forward(at::Tensor x);

  at::Tensor weight, lora_a, lora_b;
};
TESSERA_MODULE(LoraLinear);

/// x + down(tanh(up(x))) s, where s is the mean of some frozen bytes.
struct LoraBlockImpl : torch::nn::Module {
  LoraBlockImpl(int64_t dim, int64_t hidden);
  at::Tensor forward(at::Tensor x);

  LoraLinear up{nullptr}, down{nullptr};
  at::Tensor codes;
};
TESSERA_MODULE(LoraBlock);

/// Linear → blocks → LoraLinear. The outer layers belong to the root's unit, of which the first is trained.
struct LoraImpl : torch::nn::Module {
  LoraImpl(int64_t dim, int64_t hidden);
  at::Tensor forward(at::Tensor x);

  tessera::nn::Linear in{nullptr};
  std::vector<LoraBlock> blocks;
  LoraLinear out{nullptr};
};
TESSERA_MODULE(Lora);

/// Filled, the same on all ranks; with frozen weights in another dtype, if asked to.
Lora make_lora(int64_t dim = 17, int64_t hidden = 13, at::ScalarType frozen = at::kBFloat16);

/// W and B of the blocks by rows, A as copies; inputs and outputs are plain.
void parallelize_lora(Lora& lora, const DeviceMesh& tp);

}  // namespace tessera::testing
