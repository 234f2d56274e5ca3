#pragma once
// MixtureOfExperts: 8 → 12 → 23 (shared) → 12 (expert) → 8, where each rank has its own expert, whose gradients are not
// reduced. Wrapped, the expert is a unit over this rank alone, and the shared layer one over all ranks; the outer
// layers are not units. Otherwise, run_backward averages the gradients of all but the expert itself.
// Source: torch/testing/_internal/common_fsdp.py.

#include "testing/fsdp_models/nested_wrapped_models.h"

namespace tessera::testing {

class MixtureOfExpertsImpl : public NestedWrappedModuleImpl {
 public:
  explicit MixtureOfExpertsImpl(const InitOptions& options);

  at::Tensor forward(std::vector<at::Tensor> inputs) override;
  /// All ranks must call it if the model is not wrapped.
  void run_backward(const at::Tensor& loss) override;

  bool is_expert(const at::Tensor& parameter) const;
  torch::nn::Module& expert() const { return *module->ptr(2); }
  torch::nn::Module& shared() const { return *module->ptr(1); }

  int64_t num_expert_params = 0;  // elements

 private:
  DeviceMesh mesh_;
  bool is_wrapped_;
};
TESSERA_MODULE(MixtureOfExperts);

const ModelClass& mixture_of_experts();

}  // namespace tessera::testing
