#pragma once
// The functions of PyTorch's first FSDP for optimizer state before optim_state_dict and optim_state_dict_to_load
// (fsdp1/fsdp_optim_state.h), for programs that call them. Each warns, and gives what those give under the state dict
// type that its name says, whatever is set; the settings stay. New code calls those.
//
//   const auto full = full_optim_state_dict(*model, optimizer);       // rank 0's has all, the others' are empty
//   ...
//   const auto own = scatter_full_optim_state_dict(full, *model, optimizer);      // this rank's rows, by ids
//   optim_state_dict_to_load(*model, optimizer, own, {.load_directly = true});
//
// There is no `optim_input`: the optimizer itself says which parameters it has. Keys of what is saved are names, keys
// of what is to be loaded ids. Errors are those of the new functions.
//
// Thread safety: one thread a rank.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "comm/process_group.h"
#include "fsdp1/fsdp_optim_state.h"

namespace tessera {

struct FullOptimStateDictOptions {
  bool rank0_only = true;  // the other ranks get an empty dict
  /// Whose first rank that is. Null: of the units' mesh.
  const ProcessGroupPtr* group = nullptr;
};

/// Full tensors on the CPU. Collective.
OptimStateDict full_optim_state_dict(torch::nn::Module& model, torch::optim::Optimizer& optim,
                                     FullOptimStateDictOptions options = {});

/// DTensors of this rank's rows. Collective.
OptimStateDict sharded_optim_state_dict(torch::nn::Module& model, torch::optim::Optimizer& optim);

/// This rank's part of a dict of full tensors that every rank has. No communication.
OptimStateDict shard_full_optim_state_dict(const OptimStateDict& full, torch::nn::Module& model,
                                           torch::optim::Optimizer& optim);

/// A dict of sharded_optim_state_dict as the optimizer holds it. DTensors that lie otherwise than the parameter are
/// redistributed, one after the other: collective then.
OptimStateDict flatten_sharded_optim_state_dict(const OptimStateDict& sharded, torch::nn::Module& model,
                                                torch::optim::Optimizer& optim);

/// This rank's part of the dict of full tensors that the first rank has; the others pass an empty one, or any.
/// `group`: whose first rank; null: of the units' mesh. Less memory than shard_full_optim_state_dict, but all is sent.
/// Collective.
OptimStateDict scatter_full_optim_state_dict(const OptimStateDict& full, torch::nn::Module& model,
                                             torch::optim::Optimizer& optim, const ProcessGroupPtr* group = nullptr);

}  // namespace tessera
