#pragma once
// Functions of PyTorch's first FSDP that fsdp1/fsdp_optim_state.h replaces. Each warns, and acts like those under the
// state dict type in its name. Saved keys are names, keys to load are ids, and errors are the same.
// Thread safety: one thread per rank. docs/semantics.md has an example.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "comm/process_group.h"
#include "fsdp1/fsdp_optim_state.h"

namespace tessera {

struct FullOptimStateDictOptions {
  bool rank0_only = true;                  // other ranks get an empty dict
  const ProcessGroupPtr* group = nullptr;  // its first rank is rank0; null: the units' mesh
};

/// Returns full tensors on the CPU. All ranks must call it.
OptimStateDict full_optim_state_dict(torch::nn::Module& model, torch::optim::Optimizer& optim,
                                     FullOptimStateDictOptions options = {});

/// Returns DTensors of this rank's rows. All ranks must call it.
OptimStateDict sharded_optim_state_dict(torch::nn::Module& model, torch::optim::Optimizer& optim);

/// Returns this rank's shards of full tensors that every rank has, without communication.
OptimStateDict shard_full_optim_state_dict(const OptimStateDict& full, torch::nn::Module& model,
                                           torch::optim::Optimizer& optim);

/// Returns the optimizer's form of a dict of sharded_optim_state_dict. All ranks must call it if DTensors are placed
/// differently than their parameters.
OptimStateDict flatten_sharded_optim_state_dict(const OptimStateDict& sharded, torch::nn::Module& model,
                                                torch::optim::Optimizer& optim);

/// Returns this rank's shards of full tensors that only the first rank of `group` needs to have. All ranks must call
/// it.
OptimStateDict scatter_full_optim_state_dict(const OptimStateDict& full, torch::nn::Module& model,
                                             torch::optim::Optimizer& optim, const ProcessGroupPtr* group = nullptr);

}  // namespace tessera
