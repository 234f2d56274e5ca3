#pragma once
// State that affects a forward besides its inputs: random generators, autocast and DTensor scopes.
// Thread safety: for the thread that runs the rank's forward and backward.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <functional>
#include <vector>

#include "dtensor/dispatch/dispatch_scopes.h"

namespace tessera {

class ForwardContext {
 public:
  /// Captures the current state, including that of `generators`.
  explicit ForwardContext(std::vector<at::Generator> generators);

  /// Runs `forward` in the captured state and then restores the previous one, even after an exception.
  void run(const std::function<void()>& forward) const;

 private:
  struct Autocast {
    at::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };

  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> states_;  // of `generators_`
  std::vector<Autocast> autocast_;
  bool replicates_;
  bool runs_replicated_;
  ExplicitRedistribution::Level explicit_level_;
};

}  // namespace tessera
