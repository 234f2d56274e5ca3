#pragma once
// The parameters of one fully_shard unit: gathered together, freed together, reduced together. The states and the steps
// between them are in sharded_state.h. What goes through them is in parts of the group:
//
//   UnitParams      the parameters, their memory, and what is to hold of them
//   AllGather       the all-gather
//   UnitGradients   their gradients, begin() to finish()
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
    std::string api;  // the function that the user called, for messages
    DataParallelAxes axes;
    MixedPrecisionPolicy policy;
    std::optional<CPUOffloadPolicy> offload = std::nullopt;
    /// Keep a share among this many ranks after forward; 0: none.
    int64_t post_forward_ranks = 0;
    /// Up to which units of replicate share an all-reduce, in bytes; 0: they don't (reduction_queue.h).
    int64_t bucket_bytes = 0;
  };

  /// Shards `params` (contiguous leaves, at least one dim each, those that are trained of one dtype; all on the meta
  /// device or none). With post_forward_ranks, all ranks of the mesh call it together.
  ParamGroup(const std::vector<NamedParam>& params, const Options& options);

  const std::vector<ShardedParam>& params() const { return unit_params().all(); }
  const UnitParams& unit_params() const { return params_; }
  UnitParams& unit_params() { return params_; }
  UnitGradients& gradients() { return gradients_; }
  const UnitGradients& gradients() const { return gradients_; }
  const std::shared_ptr<BlockPool>& pool() const { return pool_; }
  const std::shared_ptr<StreamLane>& gather_stream() const { return gather_.stream(); }
  const DataParallelAxes& axes() const { return context_->axes; }
  /// Whether gradients are all-reduced over replicas.
  bool has_replicas() const { return context_->axes.replica_axis.has_value(); }

  /// Where the shards are to be, and whether they have no memory yet.
  at::Device shard_device() const { return context_->shard_options.device(); }
  bool is_on_meta() const { return params_.is_on_meta(); }
  /// Of the full parameters.
  at::Device unsharded_device() const { return context_->device; }
  /// Gives shards on the meta device memory on shard_device(); their values are zeros.
  void materialize();

  /// Where the unit is in its tree: the same on all ranks; not while it is gathered.
  void set_place(int64_t unit, UnitNames names, std::shared_ptr<BlockPool> pool);
  std::string_view name() const;
  /// `report` sees every step.
  void set_reporter(const std::function<void(FSDPEventKind)>& report);
  /// In place of the slots'; empty: those.
  void set_custom_all_gather(AllGatherFn all_gather) { custom_all_gather_ = std::move(all_gather); }

  ShardedState state() const { return state_; }
  bool is_unsharded() const { return state_ == ShardedState::Unsharded; }

  /// Issues the all-gather if the unit is sharded, and returns whether it was. Collective. On a device with streams,
  /// gather_stream() has waited for the shards' last writes.
  bool start_if_sharded() { return start(ShardFault::None); }
  /// The same ahead of the backward of a forward. `has_changed`: shards did so since that forward. Then backward
  /// gathers again, when it is known whether this rank's loss uses them.
  bool start_for_backward(bool has_changed) { return start(has_changed ? ShardFault::MaybeChanged : ShardFault::None); }
  /// Issues it unless that was done, and waits for it. Throws StateError on every rank if one gathered another unit,
  /// or its parameters were replaced.
  /// `changed`: what a forward, whose backward is about to use the parameters, computed with, if this is not what they
  /// are now.
  void unshard(const ParamVersions* changed = nullptr);
  /// The same for the backward of a forward that computed with `versions`. Throws StateError on every rank that gathers
  /// with this one if this one's shards changed since, and its loss uses them (`is_used`). On this one alone where
  /// nothing is gathered any more: the unit is unsharded, or the user had it gathered.
  void unshard_for_backward(const ParamVersions& versions, bool is_used);
  /// Waits for an all-gather in flight and throws it away.
  void drop_unshard();
  /// Back to shards; does nothing if they are sharded. Throws StateError, and has done so, if full parameters were
  /// written since they were gathered.
  void reshard();
  /// The same where an error is on its way already.
  void reshard_unchecked();
  /// Calls reshard(), for its error, if full parameters were written since they were gathered.
  void check_kept();
  /// Keeps a share of the smaller group, if there is one, from which the next unshard gathers.
  void reshard_after_forward();
  /// After a backward that failed: drops what it gathered (if `reshards`), its gradients and its reductions.
  void abort_backward(bool reshards);

  /// Whether shards were written since the gather of the full parameters that are there, or under way.
  bool is_outdated() const {
    return !params_.is_alias() && (is_unsharded() || state_ == ShardedState::Unsharding) && params_.has_newer_shards();
  }

 private:
  at::Tensor new_flat_shard(bool on_meta);
  void step(FSDPEventKind step);
  bool start(ShardFault fault);
  void start_gather_in_place();
  bool finish_unshard(const ParamVersions* changed);
  void check_gathered(const ParamVersions* changed);
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
  GatherTag tag_;  // that the last gather sent
  ShardedState state_ = ShardedState::Sharded;
};

}  // namespace tessera
