#include "fsdp1/param_names.h"

#include <algorithm>

namespace tessera {

std::vector<std::pair<at::Tensor, std::string>> param_to_fqn(const torch::nn::Module& model) {
  std::vector<std::pair<at::Tensor, std::string>> result;
  for (const auto& item : model.named_parameters()) {
    const bool is_tied =
        std::any_of(result.begin(), result.end(), [&](const auto& other) { return other.first.is_same(item.value()); });
    if (!is_tied) {
      result.emplace_back(item.value(), item.key());
    }
  }
  return result;
}

std::map<std::string, at::Tensor> fqn_to_param(const torch::nn::Module& model) {
  std::map<std::string, at::Tensor> result;
  for (const auto& item : model.named_parameters()) {
    result.emplace(item.key(), item.value());
  }
  return result;
}

}  // namespace tessera
