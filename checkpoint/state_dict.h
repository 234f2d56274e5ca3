#pragma once
// A model's and an optimizer's state by parameter name, out of them and back into them.
//
//   "layers.0.weight"                          in the model's state dict
//   "state.layers.0.weight.exp_avg", ".step"   in the optimizer's: what it keeps for a parameter
//   "param_groups.layers.0.weight.lr"          and the options of the parameter's group
//
// Names come from named_parameters() and named_buffers(), so the state depends neither on the order in which an
// optimizer was given its parameters nor on the number of ranks. Known optimizers: Adam, AdamW, SGD, RMSprop, Adagrad.
//
// Setters are collective, and an error of one rank is an error of all. A plain model, whose state each rank has itself,
// is the exception: then the call concerns this rank alone.
//
//   const auto state = get_model_state_dict(net, {.full_state_dict = true, .cpu_offload = true});   // every rank
//   if (get_rank() == 0) set_model_state_dict(plain, state);
//
// After torch.distributed.checkpoint.state_dict. Thread safety: for the thread that trains the model.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <string>

#include "checkpoint/format/state.h"
#include "nn/hooks/module_ref.h"

namespace tessera::dcp {

struct StateDictOptions {
  /// get: copies, whole plain tensors in place of DTensors, gathered one at a time, or a few MB of small ones. set: the
  /// given tensors are whole; each rank takes its part.
  bool full_state_dict = false;
  /// get: copies on the CPU. With full_state_dict rank 0 alone gets them, and the others get nothing; a ValueError
  /// where the model is on a mesh that rank 0 is not in.
  bool cpu_offload = false;
  /// Without parameters that need no gradient.
  bool ignore_frozen_params = false;
  /// set: rank 0 alone has the state, whole; it sends one tensor at a time, or a few MB of small ones. The others'
  /// argument is not looked at. All ranks of the default group call it, and have the model.
  bool broadcast_from_rank0 = false;
  /// set: the names must be the model's, no more and no less; an optimizer has no other state afterwards.
  bool strict = true;
};

/// Returns parameters and buffers: handles to the model's own, without options. Collective with full_state_dict.
/// Reshards a module under fully_shard first.
StateDict get_model_state_dict(ModuleRef model, const StateDictOptions& options = {});

/// Copies `state` into the model's parameters and buffers. Collective, except for a plain model (above).
/// Throws, before anything is changed:
/// - KeyError for missing and unexpected names.
/// - ValueError for sizes that differ, dtypes that differ unless both are floating, sparse tensors, and tensors without
///   memory.
/// - NotImplementedError for a buffer that is a DTensor's view and had to be a copy.
/// - StateError inside the model's forward or backward.
void set_model_state_dict(ModuleRef model, const StateDict& state, const StateDictOptions& options = {});

/// Returns the optimizer's state for `model`'s parameters: none before its first step.
/// Throws ValueError if it optimizes a tensor that is no parameter of the model, NotImplementedError for an optimizer
/// of another type.
StateDict get_optimizer_state_dict(ModuleRef model, torch::optim::Optimizer& optimizer,
                                   const StateDictOptions& options = {});

/// Sets the optimizer's state: existing tensors are written, missing ones are made. Collective, except for a plain
/// model. With strict, unknown names are a KeyError, and state that `state` lacks is removed, as by torch.optim's
/// load_state_dict; with ignore_frozen_params it stays. Throws ValueError where parameters of one group have different
/// options.
void set_optimizer_state_dict(ModuleRef model, torch::optim::Optimizer& optimizer, const StateDict& state,
                              const StateDictOptions& options = {});

/// Returns the state dict that load() fills with all that the checkpoint at `path` has for the optimizer's parameters.
/// The optimizer is not changed: pass the loaded state to set_optimizer_state_dict. Empty for a checkpoint of a model
/// alone. Collective.
StateDict optimizer_state_to_load(const std::string& path, ModuleRef model, torch::optim::Optimizer& optimizer);

}  // namespace tessera::dcp
