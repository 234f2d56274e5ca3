#include "nn/lora_adapter.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/nn/init.h>

#include <cmath>
#include <utility>

#include "nn/hooks/hook_point.h"

namespace tessera::nn {

LoraMatrixImpl::LoraMatrixImpl(int64_t rows, int64_t columns, LoraInit init, const at::TensorOptions& options)
    : init(init) {
  weight = register_parameter("weight", at::empty({rows, columns}, options));
  LoraMatrixImpl::reset_parameters();
}

void LoraMatrixImpl::reset_parameters() {
  if (init == LoraInit::Random) {
    torch::nn::init::kaiming_uniform_(weight, std::sqrt(5.0));
    return;
  }
  const at::NoGradGuard no_grad;
  weight.zero_();
}

double LoraScale::scaling() const {
  const auto rank = static_cast<double>(r);
  return lora_alpha / (use_rslora ? std::sqrt(rank) : rank);
}

LoraAdapter::LoraAdapter(LoraMatrix a, LoraMatrix b, LoraScale scale, double dropout)
    : lora_A(std::move(a)), lora_B(std::move(b)), scale(scale), dropout(dropout) {}

at::Tensor LoraAdapter::add_to(const at::Tensor& output, const at::Tensor& input) const {
  const auto& a = lora_A->weight;
  auto x = input.to(a.scalar_type());
  if (dropout > 0) {
    x = at::dropout(x, dropout, lora_A->is_training());
  }
  const auto term = at::linear(at::linear(x, a) * scale.scaling(), lora_B->weight);
  return (output + term).to(output.scalar_type());
}

at::Tensor LoraAdapter::product() const {
  return at::mm(lora_B->weight, lora_A->weight) * scale.scaling();
}

std::shared_ptr<const LoraAdapter> find_lora_adapter(const torch::nn::Module& module) {
  const auto* const point = find_hook_point(module);
  return point ? std::dynamic_pointer_cast<const LoraAdapter>(point->find<LinearAdapter>()) : nullptr;
}

}  // namespace tessera::nn
