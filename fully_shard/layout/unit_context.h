#pragma once
// UnitContext: values shared by the components of one unit's engine.

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>

#include "fully_shard/layout/data_parallel_axes.h"

namespace tessera {

struct UnitContext {
  std::string api;  // function that the user called, for messages
  DataParallelAxes axes;
  at::Device device;                           // device of full parameters
  at::TensorOptions shard_options;             // options of shards and their gradients, except the dtype
  std::optional<at::ScalarType> reduce_dtype;  // for gradients; nullopt: the parameters' dtype

  /// Returns whether shards and their gradients are on a different device than full parameters.
  bool is_offloaded() const { return shard_options.device() != device; }
};

/// Handle shared by the components.
using UnitContextPtr = std::shared_ptr<const UnitContext>;

}  // namespace tessera
