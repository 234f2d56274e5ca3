#pragma once
// What decides a computation beside its inputs: random generators, autocast, scopes of DTensor. Taken before a
// forward, so that it can be computed again alike.
//
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
  /// `generators`: those whose state counts.
  explicit ForwardContext(std::vector<at::Generator> generators);

  /// Calls `forward` in the context that was taken; afterwards everything is as before, also if it throws.
  void run(const std::function<void()>& forward) const;

 private:
  struct Autocast {
    at::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };

  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> states_;  // theirs
  std::vector<Autocast> autocast_;
  bool replicates_;
  bool runs_replicated_;
  ExplicitRedistribution::Level explicit_level_;
};

}  // namespace tessera
