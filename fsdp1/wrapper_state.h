#pragma once
// State of a module that FullyShardedDataParallel wrapped, besides the engine's own; internal to fsdp*.cpp.
// Thread safety: for the thread that runs the rank's forward and backward.

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
  FSDPOptions options;  // of this unit
  ShardingStrategy strategy = ShardingStrategy::FULL_SHARD;
  DeviceMesh mesh;
  std::shared_ptr<FSDPState> state;
  StateDictSettings state_dict_settings;
  bool mesh_was_given = false;  // rather than groups
  bool is_summoned = false;
  bool casts_around = false;                                  // stays in full precision inside a mixed-precision model
  at::ScalarType full_precision = at::kFloat;                 // compute dtype of such a module
  std::optional<at::ScalarType> cast_back_to = std::nullopt;  // dtype of such a module's inputs
  struct CastBuffer {
    at::Tensor buffer;
    at::ScalarType original;
  };
  std::vector<CastBuffer> cast_buffers;
  std::optional<CommHook> comm_hook = std::nullopt;

  TrainingState training_state() const;
  /// Throws ValueError, naming the state and the allowed ones.
  void assert_state(const std::string& where, const std::vector<TrainingState>& allowed) const;
  /// Returns whether this is a root. Makes it the root of the units below if no unit above has run yet.
  bool is_root(torch::nn::Module& module) const;
};

inline bool is_hybrid(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::HYBRID_SHARD || strategy == ShardingStrategy::_HYBRID_SHARD_ZERO2;
}

struct NamedUnit {
  std::string path;  // below the requested module; "" for itself
  torch::nn::Module* module;
  std::shared_ptr<WrapperState> unit;
};

std::shared_ptr<WrapperState> find_fsdp_unit(torch::nn::Module& module);
/// Returns the units at and below `module`, depth-first, parents first.
std::vector<NamedUnit> fsdp_units(torch::nn::Module& module);
/// Throws StateError in a forward of `at`'s module inside summon_full_params.
void check_not_summoned(bool is_summoned, const HookPoint& at);
/// Returns whether this is the rank that `rank0_only` means: the first of the units' mesh.
bool is_first_rank(const std::vector<NamedUnit>& units);

/// Returns `tensor` (a DTensor's local tensor) in the memory of `device`, itself if already there.
at::Tensor on_device(const at::Tensor& tensor, at::Device device);

/// Wraps `module` after the modules that the policy chooses. All ranks must call it.
void wrap_with_fsdp(torch::nn::Module& module, FSDPOptions options);

}  // namespace tessera
