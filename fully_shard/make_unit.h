#pragma once
// What fully_shard and replicate have in common: modules become one unit of the engine.

#include <string>
#include <vector>

#include "fully_shard/fully_shard.h"
#include "fully_shard/layout/data_parallel_axes.h"

namespace tessera {

enum class DataParallelKind { Shard, Replicate };

struct UnitRequest {
  std::string api;  // the function that the user called, for messages
  DataParallelKind kind = DataParallelKind::Shard;
  std::vector<torch::nn::Module*> modules;
  FullyShardOptions options;
  double bucket_cap_mb = 0;  // of replicate
};

/// Checks that all ranks ask for the same, shards (or wraps) the parameters and installs the hooks. Collective.
void make_unit(const UnitRequest& request);

}  // namespace tessera
