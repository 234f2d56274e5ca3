#pragma once
// One step of a redistribution on this rank's local tensor: the work around its collective.
//
// Thread safety: as comm/collectives.h.

#include <functional>

#include "comm/collectives.h"
#include "dtensor/spec/dtensor_spec.h"
#include "dtensor/spec/redistribute_plan.h"

namespace tessera {

/// A step whose collective is under way.
struct StepInFlight {
  Pending collective;
  std::function<at::Tensor()> finish;  // what is left to do once the collective is done

  at::Tensor wait() {
    collective.wait();
    return finish();
  }
};

/// Starts `step` on the `local` tensor of a DTensor of `spec`'s mesh and sizes that lies as `current` says.
StepInFlight start_step(const at::Tensor& local, const RedistributeStep& step, const DTensorSpec& spec,
                        const Placements& current);

}  // namespace tessera
