#pragma once
// Does a model train the same, sharded and not? Builds it both ways, trains both, compares losses and parameters.
//
//   test_fsdp_parity(nested_wrapped_model(), {.mesh = mesh, .num_iters = 3});
//
// The reference is the plain model with gradients averaged over the ranks. Parameters are compared only where nothing
// computes in a lower precision than float32; losses always, whatever their dtype.
// After FSDPTest._test_fsdp_parity in torch/testing/_internal/common_fsdp.py.

#include <functional>
#include <memory>
#include <optional>

#include "testing/fsdp_models/test_model.h"
#include "testing/fsdp_models/train_steps.h"
#include "testing/tensor_matchers.h"

namespace tessera::testing {

/// Averages the gradients of all parameters over `mesh` after backward: data parallelism without an engine.
class DataParallelReference : public DummyDDP {
 public:
  DataParallelReference(std::shared_ptr<FSDPTestModel> module, DeviceMesh mesh)
      : DummyDDP(std::move(module)), mesh_(std::move(mesh)) {}
  /// Collective.
  void run_backward(const at::Tensor& loss) override;

 private:
  DeviceMesh mesh_;
};

using ReferenceFn = std::function<std::shared_ptr<FSDPTestModel>(std::shared_ptr<FSDPTestModel>)>;

struct FSDPParityOptions {
  DeviceMesh mesh;
  FSDPInitMode fsdp_init_mode = FSDPInitMode::RECURSIVE;
  DEVICEInitMode device_init_mode = DEVICEInitMode::DEVICE_BEFORE;
  /// What stands around the plain model. Default: DataParallelReference.
  ReferenceFn ref_init_fn = nullptr;
  int num_iters = 2;
  double lr = 0.01;
  bool save_model = true;
  /// For all units; its mp_policy also decides how the reference computes.
  FullyShardOptions fsdp_options = {};
  ShardFn shard = nullptr;
  bool use_pure_fp16 = false;
  /// Of both trainings; the losses that are compared are then scaled ones. Off by default.
  GradScalerOptions grad_scaler = {.enabled = false};
  /// Of losses and parameters in full precision; in a lower one losses may differ by 2e-2.
  Tolerance tolerance = {};
  /// Further options of the model: add_bn.
  InitOptions init_options = {};
};

/// Throws ValueError for NO_FSDP, and for a model that cannot be built (names it, with the cause);
/// ExpectationError where a loss or a parameter differs, or the reference's loss is not finite. Collective.
void test_fsdp_parity(const ModelClass& model_class, const FSDPParityOptions& options);

}  // namespace tessera::testing
