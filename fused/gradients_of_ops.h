#pragma once
// Gradients that can be differentiated again, for fused ops whose own backward cannot; internal to this package.

#include <torch/csrc/autograd/variable.h>

#include <functional>

namespace tessera::fused {

/// Returns the gradients of ops(inputs), which are ATen's, with their graph; undefined ones of inputs that need none.
/// Undefined `grads` count as zeros. Called by a backward with create_graph.
torch::autograd::variable_list gradients_of_ops(
    const torch::autograd::variable_list& inputs, const torch::autograd::variable_list& grads,
    const std::function<torch::autograd::variable_list(const torch::autograd::variable_list&)>& ops);

}  // namespace tessera::fused
