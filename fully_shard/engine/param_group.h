#pragma once
// ParamGroup: the parameters of one unit, which are gathered, freed and reduced together.
//
//   UnitParams      the parameters, their memory and invariants
//   AllGather       the all-gather
//   UnitGradients   their gradients, from begin() to finish()
//
// sharded_state.h describes the states and transitions.
//
// Thread safety: for the thread that runs the rank's forward and backward.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fully_shard/events/comm_overrides.h"
#include "fully_shard/events/sharded_state.h"
#include "fully_shard/gather/all_gather.h"
#include "fully_shard/layout/policy.h"
#include "fully_shard/param/unit_params.h"
#include "fully_shard/reduce/unit_gradients.h"

namespace tessera {

class ParamGroup {
 public:
  struct Options {
    std::string api;  // function that the user called, for messages
    DataParallelAxes axes;
    MixedPrecisionPolicy policy;
    std::optional<CPUOffloadPolicy> offload = std::nullopt;
    int64_t post_forward_ranks = 0;  // group size of the post-forward shard; 0: none
    int64_t bucket_bytes = 0;        // limit of replicate's all-reduces (reduction_queue.h); 0: one per unit
  };

  /// Shards `params`, which are contiguous leaves with dims; trained ones have one dtype. Collective with
  /// post_forward_ranks.
  ParamGroup(const std::vector<ParamInfo>& params, const Options& options);

  const UnitContext& context() const { return *context_; }
  const std::vector<ShardedParam>& params() const { return params_.all(); }
  UnitParams& unit_params() { return params_; }
  UnitGradients& gradients() { return gradients_; }
  const std::shared_ptr<BlockPool>& pool() const { return pool_; }
  const std::shared_ptr<StreamLane>& gather_stream() const { return gather_.stream(); }
  ShardedState state() const { return state_; }
  bool is_unsharded() const { return state_ == ShardedState::Unsharded; }

  /// Allocates memory, filled with zeros, for shards that are on the meta device.
  void materialize();
  /// Sets the unit's number in its tree, equal on all ranks. Not while the unit is gathered.
  void set_place(int64_t unit, UnitNames names, std::shared_ptr<BlockPool> pool);
  std::string_view name() const;
  void set_reporter(const std::function<void(FSDPEventKind)>& report);
  /// Replaces the all-gather of comm_overrides(); an empty function restores it.
  void set_custom_all_gather(AllGatherFn all_gather) { custom_all_gather_ = std::move(all_gather); }
  const AllGatherFn& custom_all_gather() const { return custom_all_gather_; }

  /// Issues the all-gather if the unit is sharded. Collective. gather_stream() must have waited for writes of the
  /// shards.
  void start();
  /// Issues the all-gather ahead of use. MaybeChanged means that shards may have changed since the forward of the
  /// coming backward; that backward gathers again once it is known whether this rank's loss uses the parameters.
  void prefetch(ShardFault fault);
  /// Returns whether a prefetched all-gather is in flight that nothing has requested since.
  bool is_prefetched() const { return is_prefetched_ && state_ == ShardedState::Unsharding; }
  /// Unshards. Throws StateError on every rank if one gathered another unit, or its parameters were replaced. `used`
  /// are the versions that a forward computed with, if its backward will use the parameters. If the shards changed
  /// since then, throws on all ranks that gather, or on this rank only if nothing is gathered.
  void unshard(const ParamVersions* used = nullptr);
  /// Waits for an all-gather in flight and discards it.
  void drop_unshard();
  /// Frees the full parameters, if any. Then throws StateError if they were written since the gather.
  void reshard();
  void reshard_unchecked();
  /// Calls reshard() to throw its error if full parameters were written since the gather.
  void check_kept();
  /// Reshards, keeping a post-forward shard among post_forward_ranks ranks. The next unshard gathers from it.
  void reshard_after_forward();
  /// Discards the gradients and reductions of a failed backward and, with `reshards`, the gathered parameters.
  void abort_backward(bool reshards);

  /// Returns whether shards were written since the full parameters were gathered.
  bool is_outdated() const {
    return !params_.is_alias() && (is_unsharded() || state_ == ShardedState::Unsharding) && params_.has_newer_shards();
  }

 private:
  void step(FSDPEventKind step);
  bool issue(ShardFault fault);
  bool finish_unshard(const ParamVersions* changed);
  void drop_gather();
  void free_params(bool keeps_shard);

  UnitContextPtr context_;
  AllGather gather_;
  UnitParams params_;
  UnitGradients gradients_;
  std::shared_ptr<CommOverrides> slots_ = comm_overrides();
  AllGatherFn custom_all_gather_;
  std::shared_ptr<BlockPool> pool_;
  std::function<void(FSDPEventKind)> report_;
  UnitNames names_;
  GatherTag tag_;  // sent by the last gather
  ShardedState state_ = ShardedState::Sharded;
  bool is_prefetched_ = false;
};

}  // namespace tessera
