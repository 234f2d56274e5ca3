#include "nn/hooks/python_forward.h"

#include <ATen/ops/linear.h>
#include <torch/nn/modules/linear.h>

namespace tessera::detail {

at::Tensor python_forward(const torch::nn::LinearImpl& linear, const at::Tensor& input) {
  return at::linear(input, linear.weight, linear.bias);
}

}  // namespace tessera::detail
