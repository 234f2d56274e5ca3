#pragma once
// Checks that the replicas of a model hold the same values and that all trained parameters are in a unit. Replicas that
// start apart stay apart, without an error, so check before training:
//
//   replicate(model, {.mesh = mesh});        // or fully_shard with a mesh of two axes
//   check_replicas(model);
//
// To use rank 0's values on all ranks (checkpoint/state_dict.h):
//
//   dcp::set_model_state_dict(model, dcp::get_model_state_dict(model, {.full_state_dict = true}),
//                             {.broadcast_from_rank0 = true});
//
// docs/semantics.md lists what is compared. Thread safety: as reading the parameters.

#include <ATen/core/Tensor.h>

#include <vector>

#include "nn/hooks/module_ref.h"

namespace tessera {

/// Compares all replicated parameters, one at a time, on the CPU. `ignored_params` are left out. Collective.
///
/// Throws:
/// - StateError, before anything is sent, for a trained parameter in no unit, one without memory, or a model without
///   units and DTensors.
/// - ValueError, on every rank that has a copy or a part of what differs; it names the first such parameter and the
///   ranks.
void check_replicas(ModuleRef module, const std::vector<at::Tensor>& ignored_params = {});

}  // namespace tessera
