#pragma once
// What FullyShardedDataParallel keeps with each module that it wrapped, beside the engine's own state: internal to
// fsdp*.cpp. Thread safety: for the thread that runs the rank's forward and backward.

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp1/comm_hooks.h"
#include "fsdp1/fsdp_options.h"
#include "fsdp1/fsdp_state_dict.h"
#include "fsdp1/training_state.h"
#include "fully_shard/engine/fsdp_root.h"
#include "nn/hooks/hook_point.h"

namespace tessera {

struct WrapperState {
  FSDPOptions options;  // as they hold for this unit
  ShardingStrategy strategy = ShardingStrategy::FULL_SHARD;
  DeviceMesh mesh;
  std::shared_ptr<FSDPState> state;
  StateDictSettings state_dict_settings;
  bool mesh_was_given = false;  // not groups
  bool is_summoned = false;
  /// A module that stays in full precision inside of a model of mixed precision.
  bool casts_around = false;
  std::optional<at::ScalarType> cast_back_to = std::nullopt;  // what such a module's inputs were
  struct CastBuffer {
    at::Tensor buffer;
    at::ScalarType original;
  };
  std::vector<CastBuffer> cast_buffers;
  std::optional<CommHook> comm_hook = std::nullopt;

  TrainingState training_state() const;
  /// Throws ValueError that names the state and those that are allowed.
  void assert_state(const std::string& where, const std::vector<TrainingState>& allowed) const;
  /// Makes it the root of the units below it if none runs over it yet, and returns whether it is one.
  bool is_root(torch::nn::Module& module) const;
};

inline bool is_hybrid(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::HYBRID_SHARD || strategy == ShardingStrategy::_HYBRID_SHARD_ZERO2;
}

struct NamedUnit {
  std::string path;  // below the module that was asked for; "" for itself
  torch::nn::Module* module;
  std::shared_ptr<WrapperState> unit;
};

std::shared_ptr<WrapperState> find_fsdp_unit(torch::nn::Module& module);
/// At and below `module`, depth-first, parents first.
std::vector<NamedUnit> fsdp_units(torch::nn::Module& module);
/// Throws StateError for a forward of the module of `at` if its parameters are lent to summon_full_params.
void check_not_summoned(bool is_summoned, const HookPoint& at);
/// Whether this is the rank that `rank0_only` means: the first of those that have the units' mesh, which is rank 0
/// unless the mesh is over some of the ranks.
bool is_first_rank(const std::vector<NamedUnit>& units);

/// `tensor` in the memory of `device`; of a DTensor the local one. Itself where it is there.
at::Tensor on_device(const at::Tensor& tensor, at::Device device);

/// Wraps `module`, and before that the modules that the policy chooses. Collective.
void wrap_with_fsdp(torch::nn::Module& module, FSDPOptions options);

}  // namespace tessera
