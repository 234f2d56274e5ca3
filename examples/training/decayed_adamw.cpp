#include "examples/training/decayed_adamw.h"

#include <memory>
#include <utility>

namespace tessera::examples {

optim::FusedAdamW make_decayed_adamw(const std::vector<at::Tensor>& parameters, double lr, double weight_decay) {
  std::vector<at::Tensor> matrices, vectors;
  for (const auto& parameter : parameters) {
    (parameter.dim() >= 2 ? matrices : vectors).push_back(parameter);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto& [members, decay] : {std::pair(matrices, weight_decay), std::pair(vectors, 0.0)}) {
    groups.emplace_back(members, std::make_unique<torch::optim::AdamWOptions>(
                                     torch::optim::AdamWOptions(lr).betas({0.9, 0.95}).weight_decay(decay)));
  }
  return optim::FusedAdamW(groups);
}

}  // namespace tessera::examples
