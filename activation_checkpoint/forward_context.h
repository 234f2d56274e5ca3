#pragma once
// What decides a computation beside its inputs: random generators, autocast, scopes of DTensor. Taken before a
// forward, so that it can be computed again alike.
//
// Thread safety: for the thread that runs the rank's forward and backward.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <vector>

#include "dtensor/dispatch_scopes.h"

namespace tessera {

class ForwardContext {
 public:
  /// `devices`: whose libtorch generators count, beside those of DTensors; none: no generator does.
  explicit ForwardContext(std::vector<at::Device> devices);

  /// Calls `forward` in the context that was taken; afterwards everything is as before, also if it throws.
  void run(const std::function<void()>& forward) const;

 private:
  struct GeneratorState {
    at::Generator generator;
    at::Tensor state;
  };
  struct Autocast {
    at::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };

  std::vector<at::Device> devices_;
  std::vector<GeneratorState> generators_;
  std::vector<Autocast> autocast_;
  bool replicates_;
  ExplicitRedistribution::Level explicit_level_;
};

}  // namespace tessera
