#pragma once
// What fully_shard asks of a unit's parameters.

#include <string>
#include <vector>

#include "fully_shard/fully_shard.h"
#include "fully_shard/managed_params.h"
#include "fully_shard/param_group.h"

namespace tessera {

/// The parameters with the dim on which each is sharded. Throws ValueError, StateError or NotImplementedError that
/// names the first one that cannot be; `label` is the unit's, for messages.
std::vector<NamedParam> checked_params(const std::vector<ManagedParam>& params, const DeviceMesh& mesh,
                                       const FullyShardOptions& options, const std::string& label);

/// One line a parameter: name, dtype, sizes, placement.
std::vector<std::string> describe(const std::vector<NamedParam>& params);

}  // namespace tessera
