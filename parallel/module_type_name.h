#pragma once
// How errors name a module's type.

#include <torch/nn/module.h>

#include <string>

namespace tessera {

/// "torch::nn::LinearImpl", also for a hooked one.
std::string module_type_name(const torch::nn::Module& module);

}  // namespace tessera
