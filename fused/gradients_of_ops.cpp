#include "fused/gradients_of_ops.h"

#include <torch/csrc/autograd/autograd.h>

namespace tessera::fused {

using torch::autograd::variable_list;

variable_list gradients_of_ops(const variable_list& outputs, const variable_list& grads, const variable_list& inputs) {
  variable_list used_outputs, used_grads, used_inputs;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (grads[i].defined()) {
      used_outputs.push_back(outputs[i]);
      used_grads.push_back(grads[i]);
    }
  }
  for (const auto& input : inputs) {
    if (input.requires_grad()) {
      used_inputs.push_back(input);
    }
  }
  const auto found = torch::autograd::grad(used_outputs, used_inputs, used_grads, /*retain_graph=*/true,
                                           /*create_graph=*/true, /*allow_unused=*/true);
  variable_list results;
  size_t next = 0;
  for (const auto& input : inputs) {
    results.push_back(input.requires_grad() ? found[next++] : at::Tensor());
  }
  return results;
}

}  // namespace tessera::fused
