#pragma once
// The options of FullyShardedDataParallel (fsdp1/fsdp.h). Names and meaning follow torch/distributed/fsdp/api.py.

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
  FULL_SHARD,     // parameters are freed after forward (not the root's) and after backward
  SHARD_GRAD_OP,  // after backward only
  NO_SHARD,       // every rank has all of them; gradients are all-reduced
  HYBRID_SHARD,   // FULL_SHARD among some ranks, replicas among the others
  // SHARD_GRAD_OP among some ranks, replicas among the others
  _HYBRID_SHARD_ZERO2,  // NOLINT(bugprone-reserved-identifier): PyTorch's name
};
std::string_view to_string(ShardingStrategy strategy);

enum class BackwardPrefetch {
  BACKWARD_PRE,   // the next unit is gathered before this one's gradients are computed
  BACKWARD_POST,  // after that: less memory, less overlap
};

/// Where a unit's shards, their gradients and so the optimizer's state are between uses.
struct CPUOffload {
  /// In the memory of the CPU. A shard goes to the compute device for its all-gather, its gradient comes back when it
  /// is reduced; until then, inside of no_sync, gradients stay on the compute device.
  bool offload_params = false;
};

/// In which dtypes a unit computes and communicates. Only floating tensors are cast; shards, gradients of shards,
/// optimizer states and state dicts keep the dtype that the parameter had.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  /// Default: param_dtype.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
  std::optional<at::ScalarType> buffer_dtype = std::nullopt;
  /// Inputs of every unit are cast to param_dtype.
  bool cast_forward_inputs = false;
  /// Inputs of the outermost one are.
  bool cast_root_forward_inputs = true;
  /// With a wrap policy, modules of these types become units of their own in full precision, whose inputs are cast to
  /// float32 and whose outputs back.
  ModulePredicate module_classes_to_ignore =
      module_classes<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl, torch::nn::BatchNorm3dImpl>();
};

/// Over which ranks: one group for the shards, or a pair with the group of the replicas. Together they are all ranks of
/// the default group; the ranks of a smaller single group lie next to each other, or at equal distances.
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

struct FSDPOptions {
  /// Exclusive with device_mesh. Default: all ranks; for the hybrid strategies those of this host, as the launcher
  /// tells (under srun set LOCAL_WORLD_SIZE, or it is a ValueError), and their peers.
  std::optional<FSDPProcessGroup> process_group = std::nullopt;
  /// Default: FULL_SHARD. Among one rank it becomes NO_SHARD.
  std::optional<ShardingStrategy> sharding_strategy = std::nullopt;
  CPUOffload cpu_offload = {};
  /// Which modules below become units of their own, with these options (fsdp1/wrap_policy.h). Default: none, so
  /// that one unit has all parameters that were not wrapped before.
  WrapPolicy auto_wrap_policy = {};
  /// None: the next unit is gathered when its backward begins, without overlap.
  std::optional<BackwardPrefetch> backward_prefetch = BackwardPrefetch::BACKWARD_PRE;
  MixedPrecision mixed_precision = {};
  /// They and all below them are left alone, with their dtypes, devices and values, but units below them stay units.
  std::vector<torch::nn::Module*> ignored_modules = {};
  /// The same for single parameters. At most one of both is given.
  std::vector<at::Tensor> ignored_states = {};
  /// Called once for every module that has parameters or buffers on the meta device, after these got memory on
  /// device_id (the CPU); it sets what the module itself has, not what its children have.
  std::function<void(torch::nn::Module&)> param_init_fn = nullptr;
  /// Where a module on the CPU is moved, and inputs of the root are. A module on another device is an error. Default:
  /// modules and inputs stay where they are.
  std::optional<at::Device> device_id = std::nullopt;
  /// Parameters and buffers of rank 0 of the groups, on all ranks.
  bool sync_module_states = false;
  /// The next unit, in the order of the last iteration, is gathered before this one's forward computes.
  bool forward_prefetch = false;
  /// Whether the host waits before it issues an all-gather while two units' full parameters are in memory. Here false
  /// lifts no wait: units are gathered one ahead at most, either way, and memory is freed before its next use is
  /// issued.
  bool limit_all_gathers = true;
  /// One axis to shard over, or (replicas, shards) for the hybrid strategies.
  std::optional<DeviceMesh> device_mesh = std::nullopt;
};

}  // namespace tessera
