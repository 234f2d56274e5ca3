#pragma once
// Gets and sets the state of models and optimizers by parameter name.
//
//   "layers.0.weight"                          in a model's state dict
//   "state.layers.0.weight.exp_avg", ".step"   in an optimizer's: the state of a parameter
//   "param_groups.layers.0.weight.lr"          in an optimizer's: the options of the parameter's group
//
// Supports Adam, AdamW, SGD, RMSprop and Adagrad; other optimizers are a NotImplementedError. Sharded modules are
// resharded first; inside their forward or backward, this is a StateError. Setters are collective and throw on every
// rank or on none, except for plain models with plain states. docs/semantics.md has details.
// Thread safety: the thread that trains the model. Source: torch.distributed.checkpoint.state_dict.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <string>

#include "checkpoint/format/state.h"
#include "nn/hooks/module_ref.h"

namespace tessera::dcp {

struct StateDictOptions {
  bool full_state_dict = false;       // getters copy whole plain tensors; setters take whole tensors
  bool cpu_offload = false;           // getters copy to the CPU; with full_state_dict, only on rank 0
  bool ignore_frozen_params = false;  // omit parameters that require no gradient
  bool broadcast_from_rank0 = false;  // setters take whole tensors from rank 0, on all ranks of the default group
  bool strict = true;                 // setters require exactly the model's names, and remove other optimizer state
};

/// Returns parameters and buffers: handles, unless `options` request copies. Collective with full_state_dict.
StateDict get_model_state_dict(ModuleRef model, const StateDictOptions& options = {});

/// Copies `state` into parameters and buffers. Throws, before it changes anything:
/// - KeyError for missing and unexpected names.
/// - ValueError for sizes and dtypes that do not fit, and for tensors that are sparse or without memory.
/// - NotImplementedError for a buffer that is a DTensor's view and a copy.
void set_model_state_dict(ModuleRef model, const StateDict& state, const StateDictOptions& options = {});

/// Returns the options of the optimizer's groups by parameter, and state if there is any. Collective with
/// full_state_dict. Throws ValueError if the optimizer has a tensor that is not a parameter of `model`.
StateDict get_optimizer_state_dict(ModuleRef model, torch::optim::Optimizer& optimizer,
                                   const StateDictOptions& options = {});

/// Writes existing state tensors and creates missing ones. With strict, throws KeyError for unknown names and an empty
/// dict. Throws ValueError if parameters of one group have different options.
void set_optimizer_state_dict(ModuleRef model, torch::optim::Optimizer& optimizer, const StateDict& state,
                              const StateDictOptions& options = {});

/// Returns a state for load() to fill, with all entries of the checkpoint for the optimizer's parameters. Pass it to
/// set_optimizer_state_dict afterwards. Empty if only a model was saved. Collective.
StateDict optimizer_state_to_load(const std::string& path, ModuleRef model, torch::optim::Optimizer& optimizer);

}  // namespace tessera::dcp
