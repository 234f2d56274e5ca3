#pragma once
// Which units there are at and below a module.

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "device_mesh/device_mesh.h"

namespace tessera {

class FSDPState;

/// The state of `module`, null if fully_shard was not called on it.
std::shared_ptr<FSDPState> find_fsdp_state(torch::nn::Module& module);

struct NamedState {
  std::string path;  // below the module that was asked for; "root" for itself
  std::shared_ptr<FSDPState> state;
};

/// All states at and below `module`, in order of registration, parents first.
std::vector<NamedState> fsdp_states(torch::nn::Module& module);

/// The same of all modules of the unit of `module`, which comes first; where it has several, paths begin with the
/// module's place, as parameters' names do: "1.block".
std::vector<NamedState> fsdp_states_of_unit(torch::nn::Module& module);

/// On which the units' parameters lie, each once: also that of tensor parallelism.
std::vector<DeviceMesh> meshes_of(const std::vector<NamedState>& units);

/// Of these, the units with a parameter that lies cut over several ranks.
std::vector<NamedState> with_shards(std::vector<NamedState> units);

/// The parameters of all become shards. Returns why values are lost where full ones were written (ParamGroup::reshard),
/// of the first such unit; empty if there is none.
std::string reshard_each(const std::vector<NamedState>& units);

/// As throw_on_all_ranks of rank_agreement.h, on all ranks that have a part of the units' parameters. Collective.
void throw_on_all_ranks(const std::vector<NamedState>& units, const std::string& where, const std::string& fault);

}  // namespace tessera
