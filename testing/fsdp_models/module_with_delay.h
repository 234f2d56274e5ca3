#pragma once
// ModuleWithDelay: a model around another one that is late, to show races: before its units reshard in forward, after
// the loss was computed, or before each reduce-scatter of its backward. Results must not depend on it.
//
//   auto init = delayed_init_options(mesh);                           // DEVICE_AFTER
//   init.fsdp_init_mode = FSDPInitMode::RECURSIVE;
//   const auto late = nested_wrapped_model_with_delay({.before_reduction = 5.0 * get_rank()});
//   auto model = late.init(init);                                     // ranks may be late by different times
//
// After torch/testing/_internal/common_fsdp.py.

#include "nn/hooks/hooked.h"
#include "testing/fsdp_models/test_model.h"

namespace tessera::testing {

/// Returns that much later: what this rank issues next comes late. Does nothing for 0.
void delay(double milliseconds);

/// In ms.
struct Delays {
  /// Before each reshard of forward, of all units. Above 0 on all ranks or on none.
  double before_free = 0;
  double after_loss = 0;
  double before_reduction = 0;
};

class ModuleWithDelayImpl : public DummyDDP {
 public:
  ModuleWithDelayImpl(std::shared_ptr<FSDPTestModel> module, Delays delays);

  /// Patches reshards meanwhile if they are to be late; then it is collective over the default group.
  at::Tensor forward(std::vector<at::Tensor> inputs) override;
  at::Tensor get_loss(const std::vector<at::Tensor>& input, const at::Tensor& output) override;
  /// Patches the reduce-scatter meanwhile (testing/fsdp_models/patches.h). Collective over the default group.
  void run_backward(const at::Tensor& loss) override;

 private:
  Delays delays_;
};
TESSERA_MODULE(ModuleWithDelay);

/// NestedWrappedModule inside of it.
ModelClass nested_wrapped_model_with_delay(Delays delays = {});
/// MixtureOfExperts inside of it, with late reshards if it is wrapped.
ModelClass mixture_of_experts_with_delay(double before_free);

/// What its init has as defaults.
InitOptions delayed_init_options(DeviceMesh mesh);

}  // namespace tessera::testing
