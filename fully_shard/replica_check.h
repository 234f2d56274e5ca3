#pragma once
// Checks that replicas hold equal values and that all trained parameters belong to a unit. Replicas that start from
// different values stay different without an error, so check before training:
//
//   replicate(model, {.mesh = mesh});        // or fully_shard with a 2-D mesh
//   check_replicas(model);
//
// docs/semantics.md describes the comparison. Thread safety: like reading the parameters.

#include <ATen/core/Tensor.h>

#include <vector>

#include "nn/hooks/module_ref.h"

namespace tessera {

/// Compares all replicated parameters except `ignored_params`, one at a time, on the CPU. Collective. Throws:
/// - StateError if a trained parameter belongs to no unit or has no memory, or if the model has neither units nor
///   DTensors.
/// - ValueError for the first parameter that differs, on every rank that holds part of it.
void check_replicas(ModuleRef module, const std::vector<at::Tensor>& ignored_params = {});

}  // namespace tessera
