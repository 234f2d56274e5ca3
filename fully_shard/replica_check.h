#pragma once
// Checks that replicas hold the same values and that all trained parameters are in a unit. Replicas that start apart
// stay apart, without an error, so check before training:
//
//   replicate(model, {.mesh = mesh});        // or fully_shard with a mesh of two axes
//   check_replicas(model);
//
// docs/semantics.md says what is compared. Thread safety: as reading the parameters.

#include <ATen/core/Tensor.h>

#include <vector>

#include "nn/hooks/module_ref.h"

namespace tessera {

/// Compares all replicated parameters but `ignored_params`, one at a time, on the CPU. Collective. Throws StateError
/// for a trained parameter in no unit, one without memory, or a model without units and DTensors; ValueError, on every
/// rank that has a part of it, for the first parameter that differs.
void check_replicas(ModuleRef module, const std::vector<at::Tensor>& ignored_params = {});

}  // namespace tessera
