#pragma once
// A model's and an optimizer's state by parameter name, out of them and back into them.
//
//   "layers.0.weight"                          in the model's state dict
//   "state.layers.0.weight.exp_avg", ".step"   in the optimizer's: what it keeps for a parameter
//   "param_groups.layers.0.weight.lr"          and the options of the parameter's group
//
// Names come from named_parameters() and named_buffers(), so that the optimizer's state does not depend on the order in
// which parameters were given to it, on groups, or on how many ranks there are. Known optimizers: Adam, AdamW, SGD,
// RMSprop, Adagrad.
//
// Setters are collective, and an error of one rank is one of all, but for a plain model: where neither it nor the state
// has DTensors and each rank has the state itself (no broadcast_from_rank0), a call is of this rank alone, errors too.
// A call of one rank inside of the model's forward or backward, where no state can be got or set, is a StateError on it
// and on all that take part in the call, if no collective of that forward would have come first.
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
  /// get: copies, whole plain tensors in place of DTensors, one gathered at a time. set: the given tensors are whole;
  /// each rank takes its part.
  bool full_state_dict = false;
  /// get: copies on the CPU. With full_state_dict rank 0 alone gets them, and the others get nothing; a ValueError
  /// where the model is on a mesh that rank 0 is not in.
  bool cpu_offload = false;
  /// Without parameters that need no gradient.
  bool ignore_frozen_params = false;
  /// set: rank 0 alone has the state, whole; it sends one tensor at a time. The others' argument is not looked at.
  /// All ranks of the default group call it, and have the model.
  bool broadcast_from_rank0 = false;
  /// set: the names must be the model's, no more and no less; an optimizer has no other state afterwards.
  bool strict = true;
};

/// Parameters and buffers. Without options handles to the model's own. A module under fully_shard is resharded first.
/// Collective where full_state_dict is set.
StateDict get_model_state_dict(ModuleRef model, const StateDictOptions& options = {});

/// Copies `state` into the model's parameters and buffers. Collective, but for a plain model (above). Throws KeyError
/// for missing and unexpected names, ValueError for sizes that differ, for dtypes that do unless both are floating, for
/// tensors of either side that are sparse or without memory (freed, or on the meta device: call to_empty() before),
/// NotImplementedError for a buffer that is a DTensor's view and had to be a copy; nothing is changed then.
void set_model_state_dict(ModuleRef model, const StateDict& state, const StateDictOptions& options = {});

/// The state that the optimizer has for `model`'s parameters by now: none before its first step. Options as above.
/// Throws ValueError if it optimizes a tensor that is no parameter of the model, NotImplementedError for an optimizer
/// of another type.
StateDict get_optimizer_state_dict(ModuleRef model, torch::optim::Optimizer& optimizer,
                                   const StateDictOptions& options = {});

/// Gives the optimizer `state`: existing tensors are written to, missing ones are made. Collective, but for a plain
/// model (above). With strict, names of parameters that the optimizer does not have, and unknown fields, are a
/// KeyError; and what `state` lacks of the optimizer's state is taken away, as by torch.optim's load_state_dict, so
/// that a parameter that had none when it was saved begins anew (with ignore_frozen_params it stays: a parameter may
/// have been frozen when it was saved). broadcast_from_rank0 and full_state_dict as for the model. Throws ValueError
/// where parameters of one group have different options.
void set_optimizer_state_dict(ModuleRef model, torch::optim::Optimizer& optimizer, const StateDict& state,
                              const StateDictOptions& options = {});

/// The state dict that load(path, ...) fills with all the checkpoint has for the optimizer's parameters: its own
/// tensors, and new ones, laid out as the parameters, where it has none yet; empty for a checkpoint of a model alone.
/// The optimizer itself is not changed: give what was loaded to set_optimizer_state_dict. Collective.
StateDict optimizer_state_to_load(const std::string& path, ModuleRef model, torch::optim::Optimizer& optimizer);

}  // namespace tessera::dcp
