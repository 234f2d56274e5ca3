#pragma once
// The units at and below a module.

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "device_mesh/device_mesh.h"

namespace tessera {

class FSDPState;

/// Returns the state of `module`, null if fully_shard was not called on it.
std::shared_ptr<FSDPState> find_fsdp_state(torch::nn::Module& module);

struct NamedState {
  std::string path;  // below the module that was asked for; "root" for itself
  std::shared_ptr<FSDPState> state;
};

/// Returns all states at and below `module`, in order of registration, parents first.
std::vector<NamedState> fsdp_states(torch::nn::Module& module);

/// Returns the same of all modules of the unit of `module`, which comes first. Of several, paths begin with the
/// module's place, as names of parameters do: "1.block".
std::vector<NamedState> fsdp_states_of_unit(torch::nn::Module& module);

/// Returns the meshes of the units' parameters, each once, those of tensor parallelism included.
std::vector<DeviceMesh> collect_meshes(const std::vector<NamedState>& units);

/// Returns the units with a parameter that is sharded over several ranks.
std::vector<NamedState> with_shards(std::vector<NamedState> units);

/// Reshards all, and returns the first error about full parameters that were written; empty if there is none.
std::string reshard_each(const std::vector<NamedState>& units);

/// Throws `fault` (rank_agreement.h) on all ranks that have a part of the units' parameters. Collective.
void throw_on_all_ranks(const std::vector<NamedState>& units, const std::string& where, const std::string& fault);

}  // namespace tessera
