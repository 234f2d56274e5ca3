#pragma once
// Names of a model's parameters and back: sharding changes neither, so the maps hold before and after it.
// Thread safety: pure functions.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// Each parameter's name, the first if it is tied, in order of registration.
std::vector<std::pair<at::Tensor, std::string>> param_to_fqn(const torch::nn::Module& model);
/// Each name's parameter.
std::map<std::string, at::Tensor> fqn_to_param(const torch::nn::Module& model);

}  // namespace tessera
