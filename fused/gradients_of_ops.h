#pragma once
// Differentiable gradients for fused ops whose own backward is not differentiable. Internal to this package.

#include <torch/csrc/autograd/variable.h>

#include <functional>

namespace tessera::fused {

/// Returns the gradients of ops(inputs), which consists of ATen's ops, with their graph; undefined for inputs that need
/// none. Undefined `grads` count as zeros. For a backward with create_graph.
torch::autograd::variable_list gradients_of_ops(
    const torch::autograd::variable_list& inputs, const torch::autograd::variable_list& grads,
    const std::function<torch::autograd::variable_list(const torch::autograd::variable_list&)>& ops);

}  // namespace tessera::fused
