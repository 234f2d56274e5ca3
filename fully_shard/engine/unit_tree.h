#pragma once
// Finds the units at and below a module.

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "device_mesh/device_mesh.h"

namespace tessera {

class FSDPState;

/// Returns the state of `module`, or null if fully_shard was not called on it.
std::shared_ptr<FSDPState> find_fsdp_state(torch::nn::Module& module);

struct NamedState {
  std::string path;  // relative to the requested module; "root" for that module
  std::shared_ptr<FSDPState> state;
};

/// Returns all states at and below `module`, in registration order, parents first.
std::vector<NamedState> fsdp_states(torch::nn::Module& module);

/// Returns the same for all modules of the unit of `module`, which comes first. With several modules, paths begin with
/// the module's index, like parameter names: "1.block".
std::vector<NamedState> fsdp_states_of_unit(torch::nn::Module& module);

/// Returns the distinct meshes of the units' parameters, including tensor-parallel ones.
std::vector<DeviceMesh> collect_meshes(const std::vector<NamedState>& units);

/// Returns the units with a parameter that is sharded over several ranks.
std::vector<NamedState> with_shards(std::vector<NamedState> units);

/// Reshards all units, and returns the first error about writes to full parameters, or "".
std::string reshard_each(const std::vector<NamedState>& units);

/// Throws `fault` (rank_agreement.h) on all ranks that hold part of the units' parameters. Collective.
void throw_on_all_ranks(const std::vector<NamedState>& units, const std::string& where, const std::string& fault);

}  // namespace tessera
