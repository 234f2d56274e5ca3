#pragma once
// Do the replicas of a model hold the same values? Nothing brings replicas together that began apart: equal gradients
// change them equally, and each trains a model of its own, without an error. Every rank keeps the values that it had
// when replicate or fully_shard was called (DistributedDataParallel sends rank 0's to all), so ask before training:
//
//   replicate(model, {.mesh = mesh});        // or fully_shard with a mesh of two axes
//   check_replicas(model);
//
// Where they differ, rank 0's values for all:
//
//   dcp::set_model_state_dict(model, dcp::get_model_state_dict(model, {.full_state_dict = true}),
//                             {.broadcast_from_rank0 = true});                       // checkpoint/state_dict.h
//
// Thread safety: as reading the parameters.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

namespace tessera {

/// Throws ValueError, on every rank that has a replica or a tensor-parallel part of one, unless all replicas of the
/// parameters in units at and below `module` have the same values, bit for bit; names the first parameter that differs,
/// and the ranks. Copies every parameter of the own rank to the CPU, one at a time. Collective where there are replicas
/// (replicate, HSDP); a model without any passes. Throws StateError if no module at or below it is a unit, or a
/// parameter has no memory yet.
void check_replicas(torch::nn::Module& module);

template <class Impl>
void check_replicas(const torch::nn::ModuleHolder<Impl>& module) {
  check_replicas(static_cast<torch::nn::Module&>(*module.ptr()));
}

}  // namespace tessera
