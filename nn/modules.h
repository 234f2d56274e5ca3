#pragma once
// All layers of tessera::nn: torch::nn's with a hook point, RMSNorm, and a Sequential that nests. Losses, pooling with
// indices, and containers without a forward need no hooks: use torch::nn's.

#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include "nn/activation.h"
#include "nn/conv.h"
#include "nn/dropout.h"
#include "nn/embedding.h"
#include "nn/linear.h"
#include "nn/normalization.h"
#include "nn/pooling.h"
#include "nn/recurrent.h"
#include "nn/rms_norm.h"
#include "nn/sequential.h"
#include "nn/transformer.h"

namespace tessera::nn {

// These have no forward to hook. Shard their elements.
using torch::nn::ModuleDict;
using torch::nn::ModuleList;

}  // namespace tessera::nn
