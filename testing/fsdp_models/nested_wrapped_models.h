#pragma once
// Chains of Linear layers without activations, in nested units:
//
//   NestedWrappedModule            8 → 4 → (4 → 16 → 16) → 4 → 8; units: 1, 1.0 in it, and 2 (caller wraps the top)
//   AlwaysWrapNestedWrappedModule  the same layers; every module is a unit, including containers and the top
//   NonUniformReqGradNWM           the last two layers share the unit 2, and only the very last is trained: under FSDP,
//                                  few ranks then have trainable shards, and others have nothing to update
//
// Each has 10 parameters of 496 elements. The input is equal in each call but differs between ranks; the loss is the
// sum of the output. Source: torch/testing/_internal/common_fsdp.py.

#include "nn/hooks/hooked.h"
#include "nn/linear.h"
#include "nn/sequential.h"
#include "testing/fsdp_models/test_model.h"

namespace tessera::testing {

class NestedWrappedModuleImpl : public FSDPTestModel {
 public:
  /// Draws the layers (seed 0 if deterministic) without moving them.
  explicit NestedWrappedModuleImpl(const InitOptions& options);

  std::vector<at::Tensor> get_input(at::Device device) override;
  at::Tensor forward(std::vector<at::Tensor> inputs) override;
  at::Tensor get_loss(const std::vector<at::Tensor>& input, const at::Tensor& output) override;

  tessera::nn::Sequential module{nullptr};

 protected:
  struct NoLayers {};
  NestedWrappedModuleImpl(const InitOptions& options, NoLayers);

  int rank_;
  int world_size_;
};
TESSERA_MODULE(NestedWrappedModule);

class NonUniformReqGradNWMImpl : public NestedWrappedModuleImpl {
 public:
  explicit NonUniformReqGradNWMImpl(const InitOptions& options);
};
TESSERA_MODULE(NonUniformReqGradNWM);

const ModelClass& nested_wrapped_model();
const ModelClass& always_wrap_nested_wrapped_model();
const ModelClass& non_uniform_req_grad_model();

/// Freezes all parameters but those at module.2...1..., with or without a wrapper's name in between.
void freeze_all_but_last(torch::nn::Module& model);

}  // namespace tessera::testing
