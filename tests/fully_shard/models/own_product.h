#pragma once
// A product whose backward is the program's own.

#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/custom_function.h>

namespace tessera::testing {

/// Of rows with a vector. It gets zeros in place of a gradient that is not there, as all functions of a program do.
struct OwnProduct : torch::autograd::Function<OwnProduct> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& scale) {
    context->save_for_backward({x, scale});
    return x * scale;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    return {grads[0] * saved[1], (grads[0] * saved[0]).sum(0)};
  }
};

}  // namespace tessera::testing
