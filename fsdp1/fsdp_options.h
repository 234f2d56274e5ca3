#pragma once
// Options of FullyShardedDataParallel (fsdp1/fsdp.h). Source: torch/distributed/fsdp/api.py.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>

#include <optional>
#include <string_view>
#include <vector>

#include "comm/process_group.h"
#include "device_mesh/device_mesh.h"
#include "fsdp1/wrap_policy.h"

namespace tessera {

enum class ShardingStrategy {
  FULL_SHARD,     // frees parameters after forward (except the root's) and after backward
  SHARD_GRAD_OP,  // frees them after backward only
  NO_SHARD,       // replicates parameters and all-reduces gradients
  HYBRID_SHARD,   // FULL_SHARD in a group of ranks, replicated across groups
  // SHARD_GRAD_OP in a group of ranks, replicated across groups.
  _HYBRID_SHARD_ZERO2,  // NOLINT(bugprone-reserved-identifier): PyTorch's name
};
std::string_view to_string(ShardingStrategy strategy);

enum class BackwardPrefetch {
  BACKWARD_PRE,   // gather the next unit before computing this one's gradients
  BACKWARD_POST,  // gather it after that: less memory, less overlap
};

/// Placement of shards, their gradients and optimizer state between uses.
struct CPUOffload {
  bool offload_params = false;  // keep them in CPU memory
};

/// Dtypes for computation and communication. Shards, their gradients, optimizer state and state dicts keep the
/// parameter's dtype. Casts apply to floating tensors.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;  // default: param_dtype
  std::optional<at::ScalarType> buffer_dtype = std::nullopt;
  bool cast_forward_inputs = false;      // of every unit, to param_dtype
  bool cast_root_forward_inputs = true;  // of the outermost unit
  /// With a wrap policy, makes modules of these types separate units in float32, casting their inputs and outputs.
  ModulePredicate module_classes_to_ignore =
      module_classes<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl, torch::nn::BatchNorm3dImpl>();
};

/// Group of the shards, or also of the replicas; together, groups cover the default group (fsdp1/fsdp_group_mesh.h).
class FSDPProcessGroup {
 public:
  FSDPProcessGroup(const ProcessGroupPtr& shard) : shard_(group_ranks(shard)) {}  // NOLINT: a group as it is
  FSDPProcessGroup(const ProcessGroupPtr& shard, const ProcessGroupPtr& replicate)
      : shard_(group_ranks(shard)), replicate_(group_ranks(replicate)) {}

  const std::vector<int64_t>& shard_ranks() const { return shard_; }
  const std::optional<std::vector<int64_t>>& replicate_ranks() const { return replicate_; }

 private:
  std::vector<int64_t> shard_;
  std::optional<std::vector<int64_t>> replicate_;
};

/// A device, or the index of a GPU.
class DeviceId {
 public:
  DeviceId(at::Device device) : device_(device) {}  // NOLINT: a device as it is
  DeviceId(at::DeviceType type) : device_(type) {}  // NOLINT: the current device of this type
  DeviceId(int64_t gpu);                            // NOLINT: throws ValueError unless it fits an index
  operator at::Device() const { return device_; }   // NOLINT: reads as the device that it is
  /// Returns it with an index, or the CPU. Throws ValueError if there is no such GPU.
  at::Device resolved() const;

 private:
  at::Device device_;
};

struct FSDPOptions {
  /// Default: all ranks; for hybrid strategies, those of this host (under srun, set LOCAL_WORLD_SIZE) and their peers.
  /// Exclusive with device_mesh.
  std::optional<FSDPProcessGroup> process_group = std::nullopt;
  std::optional<ShardingStrategy> sharding_strategy = std::nullopt;  // FULL_SHARD; on one rank NO_SHARD
  CPUOffload cpu_offload = {};
  /// Chooses inner modules that become units with these options (fsdp1/wrap_policy.h). Default: none.
  WrapPolicy auto_wrap_policy = {};
  std::optional<BackwardPrefetch> backward_prefetch = BackwardPrefetch::BACKWARD_PRE;
  MixedPrecision mixed_precision = {};
  /// Modules to leave alone, with everything below them except units.
  std::vector<torch::nn::Module*> ignored_modules = {};
  std::vector<at::Tensor> ignored_states = {};  // parameters to leave alone; exclusive with ignored_modules
  /// Initializes a module's own meta tensors, with memory on device_id (or the CPU). Runs once per module.
  std::function<void(torch::nn::Module&)> param_init_fn = nullptr;
  /// Device to move CPU modules and the root's inputs to. Default: where the module is. One on another device is an
  /// error.
  std::optional<DeviceId> device_id = std::nullopt;
  bool sync_module_states = false;  // broadcast parameters and buffers from rank 0 of the groups
  bool forward_prefetch = false;    // gather the next unit of the last iteration before computing this one
  bool limit_all_gathers = true;    // no effect: at most one unit is gathered ahead anyway
  std::optional<DeviceMesh> device_mesh = std::nullopt;  // 1-D, or (replicas, shards) for hybrid strategies
};

}  // namespace tessera
