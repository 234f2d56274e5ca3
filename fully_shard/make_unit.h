#pragma once
// The common part of fully_shard and replicate: modules become one unit of the engine.

#include <map>
#include <string>
#include <vector>

#include "dtensor/spec/dtensor_spec.h"
#include "fully_shard/engine/param_group.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/layout/data_parallel_axes.h"

namespace tessera {

enum class DataParallelKind { Shard, Replicate };

struct UnitConfig {
  std::string api;  // the function that the user called, for messages
  DataParallelKind kind = DataParallelKind::Shard;
  std::vector<torch::nn::Module*> modules;
  FullyShardOptions options;
  double bucket_cap_mb = 0;  // of replicate
};

/// How a unit was made, kept with each of its modules: enough to make it again from a copy of them.
struct UnitRecipe {
  UnitConfig request;  // with the mesh; the modules own this, and so are alive
  /// Specs of tensor parallelism, by the names of parameters in the unit.
  std::map<std::string, SpecPtr> tp_specs;
  /// Grows from unit to unit: each has the parameters that none before it took.
  int64_t number;
};

/// Returns what the request means to the engine, over `mesh`. Throws ValueError, whose message begins with `where`.
ParamGroup::Options group_options(const UnitConfig& request, const DeviceMesh& mesh, const std::string& where);

/// Returns what `param` of a unit was before it was sharded, of another dtype perhaps, without memory. `tp_spec`: its
/// spec of tensor parallelism, if any.
at::Tensor unsharded_on_meta(const at::Tensor& param, const SpecPtr& tp_spec, at::ScalarType dtype);

/// Checks that all ranks ask for the same, shards (or wraps) the parameters and installs the hooks. Collective.
void make_unit(const UnitConfig& request);

}  // namespace tessera
