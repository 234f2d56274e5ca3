#pragma once
// Chains of Linear layers without activations, nested so that units lie in units:
//
//   NestedWrappedModule            8 → 4 → (4 → 16 → 16) → 4 → 8; units: 1, 1.0 inside it, and 2. The caller wraps the
//   top. AlwaysWrapNestedWrappedModule  the same layers; every module is a unit, containers and the top too
//   NonUniformReqGradNWM           the last two layers share the unit 2, and only the very last is trained: under
//                                  FSDP all that is trainable then lies on few ranks, and others have nothing to update
//
// Each has 10 parameters of 496 elements. The input is the same at every call, another one on every rank; the loss is
// the sum of the output. After torch/testing/_internal/common_fsdp.py.

#include "nn/hooks/hooked.h"
#include "nn/linear.h"
#include "nn/sequential.h"
#include "testing/fsdp_models/test_model.h"

namespace tessera::testing {

class NestedWrappedModuleImpl : public FSDPTestModel {
 public:
  /// Draws the layers (seed 0 if deterministic) and moves nothing.
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

/// Leaves only the parameters trainable whose path is module.2...1..., with or without a wrapper's name between.
void freeze_all_but_last(torch::nn::Module& model);

}  // namespace tessera::testing
