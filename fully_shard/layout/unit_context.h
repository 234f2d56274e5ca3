#pragma once
// UnitContext: what the parts of one unit's engine have in common.

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>

#include "fully_shard/layout/data_parallel_axes.h"

namespace tessera {

struct UnitContext {
  std::string api;  // the function that the user called, for messages
  DataParallelAxes axes;
  at::Device device;                           // of the full parameters
  at::TensorOptions shard_options;             // of shards and their gradients, except for their dtype
  std::optional<at::ScalarType> reduce_dtype;  // of gradients; none: that of the parameters

  /// Returns whether shards and their gradients lie elsewhere than full parameters.
  bool is_offloaded() const { return shard_options.device() != device; }
};

/// Shared by the parts.
using UnitContextPtr = std::shared_ptr<const UnitContext>;

}  // namespace tessera
