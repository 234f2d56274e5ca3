#pragma once
// Runs one step of a redistribution on this rank's local tensor. Thread safety: like comm/collectives.h.

#include <functional>

#include "comm/collectives.h"
#include "dtensor/spec/dtensor_spec.h"
#include "dtensor/spec/redistribute_plan.h"

namespace tessera {

/// A step whose collective is in flight.
struct StepInFlight {
  Pending collective;
  std::function<at::Tensor()> finish;  // remaining work after the collective

  at::Tensor wait() {
    collective.wait();
    return finish();
  }
};

/// Starts `step` on the `local` tensor of a DTensor with `spec`'s mesh and sizes and placements `current`.
StepInFlight start_step(const at::Tensor& local, const RedistributeStep& step, const DTensorSpec& spec,
                        const Placements& current);

}  // namespace tessera
