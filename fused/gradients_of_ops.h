#pragma once
// Gradients that can be differentiated again, for fused ops whose own backward cannot; internal to this package.

#include <torch/csrc/autograd/variable.h>

namespace tessera::fused {

/// Returns the gradients of `outputs`, which ATen's ops have computed from `inputs`, with their graph; undefined ones
/// of inputs that need none. Undefined `grads` count as zeros. Called by a backward with create_graph.
torch::autograd::variable_list gradients_of_ops(const torch::autograd::variable_list& outputs,
                                                const torch::autograd::variable_list& grads,
                                                const torch::autograd::variable_list& inputs);

}  // namespace tessera::fused
