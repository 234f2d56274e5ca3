#pragma once
// Maps a model's parameters to names and back. Sharding changes neither. Thread safety: pure functions.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// Returns parameters and their names in order of registration, with the first name of a tied parameter.
std::vector<std::pair<at::Tensor, std::string>> param_to_fqn(const torch::nn::Module& model);
/// Returns the parameter of each name.
std::map<std::string, at::Tensor> fqn_to_param(const torch::nn::Module& model);

}  // namespace tessera
