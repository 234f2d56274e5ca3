#pragma once
// ModuleWithDelay: wraps a model and delays it, to expose races. Delays are before units reshard in forward, after the
// loss is computed, or before each reduce-scatter of backward. Results must not depend on it.
//
//   auto init = delayed_init_options(mesh);                           // DEVICE_AFTER
//   init.fsdp_init_mode = FSDPInitMode::RECURSIVE;
//   const auto late = nested_wrapped_model_with_delay({.before_reduction = 5.0 * get_rank()});
//   auto model = late.init(init);                                     // delays may differ between ranks
//
// Source: torch/testing/_internal/common_fsdp.py.

#include "nn/hooks/hooked.h"
#include "testing/fsdp_models/test_model.h"

namespace tessera::testing {

/// Returns after a delay, so that this rank's next work is late. Does nothing for 0.
void delay(double milliseconds);

/// Delays in ms.
struct Delays {
  /// Before each reshard of forward, in all units. Positive on all ranks or on none.
  double before_free = 0;
  double after_loss = 0;
  double before_reduction = 0;
};

class ModuleWithDelayImpl : public DummyDDP {
 public:
  ModuleWithDelayImpl(std::shared_ptr<FSDPTestModel> module, Delays delays);

  /// Patches reshards if they are to be late, for which all ranks of the default group must call it.
  at::Tensor forward(std::vector<at::Tensor> inputs) override;
  at::Tensor get_loss(const std::vector<at::Tensor>& input, const at::Tensor& output) override;
  /// Patches the reduce-scatter (testing/fsdp_models/patches.h). All ranks of the default group must call it.
  void run_backward(const at::Tensor& loss) override;

 private:
  Delays delays_;
};
TESSERA_MODULE(ModuleWithDelay);

/// Wraps a NestedWrappedModule.
ModelClass nested_wrapped_model_with_delay(Delays delays = {});
/// Wraps a MixtureOfExperts, with late reshards if it is wrapped.
ModelClass mixture_of_experts_with_delay(double before_free);

/// Returns the defaults of its init.
InitOptions delayed_init_options(DeviceMesh mesh);

}  // namespace tessera::testing
