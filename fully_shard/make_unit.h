#pragma once
// Shared implementation of fully_shard and replicate: makes modules a unit of the engine.

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
  std::string api;  // name of the function that the user called, for messages
  DataParallelKind kind = DataParallelKind::Shard;
  std::vector<torch::nn::Module*> modules;
  FullyShardOptions options;
  double bucket_cap_mb = 0;  // for replicate
};

/// Record of how a unit was made, stored with each of its modules. A copy of them can then get the same unit.
struct UnitRecipe {
  UnitConfig request;  // includes the mesh; the modules own this record, so they are alive
  /// Tensor-parallel specs by parameter name within the unit.
  std::map<std::string, SpecPtr> tp_specs;
  /// Increases from unit to unit. Each unit owns the parameters that no earlier unit took.
  int64_t number;
};

/// Returns the engine options for the request over `mesh`. Throws ValueError with a message that begins with `where`.
ParamGroup::Options group_options(const UnitConfig& request, const DeviceMesh& mesh, const std::string& where);

/// Returns a meta tensor like `param` of a unit before it was sharded, with `dtype`. `tp_spec` is its tensor-parallel
/// spec, or null.
at::Tensor unsharded_on_meta(const at::Tensor& param, const SpecPtr& tp_spec, at::ScalarType dtype);

/// Checks that all ranks request the same unit, shards (or wraps) the parameters, and installs the hooks. Collective.
void make_unit(const UnitConfig& request);

}  // namespace tessera
