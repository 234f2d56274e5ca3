#include "fused/gradients_of_ops.h"

#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/autograd.h>

namespace tessera::fused {

using torch::autograd::variable_list;

variable_list gradients_of_ops(const variable_list& inputs, const variable_list& grads,
                               const std::function<variable_list(const variable_list&)>& ops) {
  variable_list aliases, wanted;  // aliases, because an input may depend on another
  for (const auto& input : inputs) {
    aliases.push_back(at::alias(input));
    if (input.requires_grad()) {
      wanted.push_back(aliases.back());
    }
  }
  const auto outputs = ops(aliases);
  variable_list used_outputs, used_grads;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (grads[i].defined()) {
      used_outputs.push_back(outputs[i]);
      used_grads.push_back(grads[i]);
    }
  }
  const auto found = torch::autograd::grad(used_outputs, wanted, used_grads, /*retain_graph=*/true,
                                           /*create_graph=*/true, /*allow_unused=*/true);
  variable_list results;
  size_t next = 0;
  for (const auto& input : inputs) {
    results.push_back(input.requires_grad() ? found[next++] : at::Tensor());
  }
  return results;
}

}  // namespace tessera::fused
