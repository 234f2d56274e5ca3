#pragma once
// Trains a model sharded and not, and compares losses and parameters.
//
//   test_fsdp_parity(nested_wrapped_model(), {.mesh = mesh, .num_iters = 3});
//
// The reference is the plain model with gradients averaged over the ranks. Parameters are compared only if nothing
// computes in a lower precision than float32; losses always.
// Source: FSDPTest._test_fsdp_parity in torch/testing/_internal/common_fsdp.py.

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
  /// All ranks must call it.
  void run_backward(const at::Tensor& loss) override;

 private:
  DeviceMesh mesh_;
};

using ReferenceFn = std::function<std::shared_ptr<FSDPTestModel>(std::shared_ptr<FSDPTestModel>)>;

struct FSDPParityOptions {
  DeviceMesh mesh;
  FSDPInitMode fsdp_init_mode = FSDPInitMode::RECURSIVE;
  DEVICEInitMode device_init_mode = DEVICEInitMode::DEVICE_BEFORE;
  /// Wrapper of the plain model. Default: DataParallelReference.
  ReferenceFn ref_init_fn = nullptr;
  int num_iters = 2;
  double lr = 0.01;
  bool save_model = true;
  /// Options of all units; mp_policy also determines how the reference computes.
  FullyShardOptions fsdp_options = {};
  ShardFn shard = nullptr;
  /// Wraps units in FullyShardedDataParallel with these options, instead of the two above.
  std::optional<FSDPOptions> wrapper_options = std::nullopt;
  bool use_pure_fp16 = false;
  /// Scaler of both trainings, whose losses are then scaled. Off by default.
  GradScalerOptions grad_scaler = {.enabled = false};
  /// Tolerance of losses and parameters in full precision; in lower precision losses may differ by 2e-2.
  Tolerance tolerance = {};
  /// Further options of the model: add_bn.
  InitOptions init_options = {};
};

/// Throws ValueError for NO_FSDP, and for a model that cannot be built (with its name and the cause). Throws
/// ExpectationError if a loss or parameter differs, or the reference's loss is not finite. All ranks must call it.
void test_fsdp_parity(const ModelClass& model_class, const FSDPParityOptions& options);

}  // namespace tessera::testing
