#pragma once
// Do the replicas of a model hold the same values, and is all that trains in a unit? Nothing brings replicas together
// that began apart: equal gradients change them equally, and each trains a model of its own, without an error. Every
// rank keeps the values that it had when replicate or fully_shard was called (DistributedDataParallel sends rank 0's to
// all), so ask before training:
//
//   replicate(model, {.mesh = mesh});        // or fully_shard with a mesh of two axes
//   check_replicas(model);
//
// Where they differ, rank 0's values for all:
//
//   dcp::set_model_state_dict(model, dcp::get_model_state_dict(model, {.full_state_dict = true}),
//                             {.broadcast_from_rank0 = true});                       // checkpoint/state_dict.h
//
// Compared are, bit for bit, the parameters of units
//
//   replicate, HSDP          along the axis of replicas
//   with parallelize_module  also along each axis of the plan, those that it does not cut there: the plain ones, which
//                            no style of the plan touches, and the replicated DTensors
//
// and those of a model with a plan alone, without units. Plain parameters are to be the same on ranks that run a layer
// together: they are fed the same, and each would keep what its own seed gave it. Not compared: along an axis that
// neither a unit nor a DTensor lies on, as that of pipeline stages; beside units, parameters in none; buffers. What
// differs along an axis of the plan on purpose, as plain parameters of a rank's own experts, goes into ignored_params.
//
// A parameter in no unit, as the embedding where only blocks were given to fully_shard, is such a replica, too: it
// stays plain, its gradient is this rank's alone, and it drifts apart from the other ranks' without an error.
//
// Thread safety: as reading the parameters.

#include <ATen/core/Tensor.h>

#include <vector>

#include "nn/hooks/module_ref.h"

namespace tessera {

/// Throws StateError, before anything is sent, for a parameter at or below `module` that requires a gradient and is in
/// no unit; not if a unit was told to ignore it, or it is one of `ignored_params`, whose gradients the program reduces
/// by itself and which are not compared, or there are no units but a plan. Then throws ValueError, on every rank that
/// has a copy of what differs, or a part beside it, unless the copies have the same values; names the first parameter
/// that differs, and the ranks. Copies every compared parameter of the own rank to the CPU, one at a time. Collective
/// where something is compared; a model of shards over one axis passes. Throws StateError also if no module at or below
/// it is a unit and no parameter a DTensor, or a parameter has no memory yet.
void check_replicas(ModuleRef module, const std::vector<at::Tensor>& ignored_params = {});

}  // namespace tessera
