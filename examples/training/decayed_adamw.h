#pragma once
// The optimizer of train_gpt and finetune.

#include <ATen/core/Tensor.h>

#include <vector>

#include "optim/fused_optimizers.h"

namespace tessera::examples {

/// Makes an AdamW with betas (0.9, 0.95) that applies weight decay to matrices only, not to biases and norms.
optim::FusedAdamW make_decayed_adamw(const std::vector<at::Tensor>& parameters, double lr, double weight_decay);

}  // namespace tessera::examples
