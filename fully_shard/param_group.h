#pragma once
// The parameters of one fully_shard unit: gathered together, freed together, reduced together. The states and the
// steps between them are in unit_state.h; taking the gradients, resharding and reducing them goes
//
//   begin_backward() → autograd accumulates → reshard() → collect_gradients() → start_reduction() ...
//     finish_reduction()
//
// The shards of all parameters are views of one flat buffer (shard_format.h), so the all-gather has no copy-in, and the
// full parameters lie in one block of the pool, so that they come and go at once.
//
// Thread safety: for the thread that runs the rank's forward and backward.

#include <memory>
#include <string>
#include <vector>

#include "fully_shard/engine_slots.h"
#include "fully_shard/gradient_parts.h"
#include "fully_shard/policy.h"
#include "fully_shard/sharded_param.h"
#include "fully_shard/unit_gather.h"
#include "fully_shard/unit_state.h"

namespace tessera {

struct NamedParam {
  at::Tensor tensor;
  std::shared_ptr<const ParameterOrigin> origin;
  int64_t shard_dim = 0;
  SpecPtr tp_spec = nullptr;  // where tensor parallelism put it; null for a plain tensor
  GatherItem gather;          // how it is sent, and computed with

  /// Sizes of what one rank has of it while it is unsharded.
  at::IntArrayRef unsharded_sizes() const { return tp_spec ? tp_spec->local_sizes() : tensor.sizes(); }
};

class ParamGroup {
 public:
  struct Options {
    std::string api;  // the function that the user called, for messages
    DataParallelAxes axes;
    MixedPrecisionPolicy policy;
    std::optional<CPUOffloadPolicy> offload = std::nullopt;
    /// Keep a share among this many ranks after forward; 0: none.
    int64_t smaller_ranks = 0;
    /// Up to which units of replicate share an all-reduce, in bytes; 0: they don't (reduction_queue.h).
    int64_t bucket_bytes = 0;
  };

  /// Shards `params` (contiguous leaves, at least one dim each, those that are trained of one dtype; all on the meta
  /// device or none). With smaller_ranks, all ranks of the mesh call it together.
  ParamGroup(const std::vector<NamedParam>& params, Options options);

  /// Where the shards are to be, and whether they have no memory yet.
  at::Device shard_device() const { return options_.offload ? at::Device(at::kCPU) : compute_device_; }
  bool is_on_meta() const { return flat_shard_.is_meta(); }
  /// Of the full parameters.
  at::Device unsharded_device() const { return compute_device_; }
  /// Gives shards on the meta device memory on shard_device(); their values are zeros.
  void materialize();

  UnitState state() const { return state_; }
  bool is_unsharded() const { return state_ == UnitState::Unsharded; }

  /// Where the unit is in its tree: the same on all ranks; not while it is gathered. `report` sees every step.
  void set_place(int64_t unit, UnitNames names, std::shared_ptr<BlockPool> pool);
  void set_reporter(std::function<void(UnitStep)> report) { report_ = std::move(report); }
  /// In place of the slots'; empty: those.
  void set_custom_all_gather(AllGatherFn all_gather) { custom_all_gather_ = std::move(all_gather); }
  std::string_view name() const;
  /// Whether no other unit of the tree has parameters: then its gradients are reduced in parts, if bucket_bytes says
  /// so. Only while nothing is in flight.
  void set_alone(bool is_alone);
  int64_t bucket_bytes() const { return options_.bucket_bytes; }

  /// Issues the all-gather if the unit is sharded, and returns whether it was. Collective. On a device with streams,
  /// gather_stream() has waited for the shards' last writes.
  bool start_if_sharded();
  /// Issues it unless that was done, and waits for it. Throws StateError on every rank if one gathered another unit,
  /// or its parameters were replaced.
  void unshard();
  /// Waits for an all-gather in flight and throws it away.
  void drop_unshard();
  /// Back to shards; does nothing if they are sharded.
  void reshard();
  /// Keeps a share of the smaller group, if there is one, from which the next unshard gathers.
  void reshard_after_forward();

  /// Throws StateError if a parameter was frozen while its gradient waits for the reduction: nobody would reduce it
  /// now, and a later one would add it to gradients of another time.
  void check_none_frozen_since();
  /// Sets sharded gradients aside, of parameters that require one, so that backward accumulates unsharded ones.
  void begin_backward();
  /// Without reduction: gradients that were set aside are the parameters' again.
  void restore_gradients();
  /// Without communication: keeps the accumulated gradients for a later reduction.
  void keep_gradients();
  GradientParts& gradients() { return gradients_; }
  const GradientParts& gradients() const { return gradients_; }
  /// The steps of GradientReduction for one part of the gradients. collect_gradients() returns whether there is
  /// anything to reduce, and throws StateError if parameters of several dtypes are trained; start_all_reduce() whether
  /// an all-reduce is in flight. After either of the last two is_copying() says whether finish_reduction() is to be
  /// called (again).
  bool collect_gradients(size_t part, const GradientSettings& settings);
  void start_reduction(size_t part);
  void start_reduction_in(size_t part, const at::Tensor& buffer);
  bool start_all_reduce(size_t part);
  void finish_reduction(size_t part);
  bool is_copying(size_t part) const { return gradients_.reduction(part).is_copying(); }
  bool is_reducing() const;
  /// Drops the gradient that autograd has just accumulated.
  void drop_arrived(size_t param) { params_[param].drop_accumulated(); }
  /// Lets the sharded gradient that autograd has just accumulated lie as its parameter does. Collective where it does
  /// not.
  void place_sharded_gradient(size_t param) { params_[param].place_sharded_grad(); }
  /// Drops unsharded gradients and puts back the sharded ones, where zero_grad() and optimizers find them: once a
  /// backward has failed. Nothing is waited for.
  void give_gradients_back();
  /// After a backward that failed: drops what it gathered (if `reshards`), its gradients and its reductions.
  void abort_backward(bool reshards);

  const std::vector<ShardedParam>& params() const { return params_; }
  /// Whether `tensor` is a full parameter or a view of one: memory that goes with reshard(), or is the shard's.
  bool lends_memory_to(const at::Tensor& tensor) const;
  std::vector<int64_t> versions() const;
  /// Grows with each change in place of a shard.
  int64_t version() const;
  /// Whether shards were written since the gather of the full parameters that are there, or under way: by a loader,
  /// say.
  bool is_outdated() const {
    return !is_alias_ && (is_unsharded() || state_ == UnitState::Gathering) && version() != gathered_version_;
  }
  /// Throws StateError if a parameter changed since versions() gave `versions`.
  void check_versions(const std::vector<int64_t>& versions) const;
  /// Throws StateError if a full parameter was written since expect_no_writes(): its shards would not keep that, or its
  /// replicas not have it. Not where one rank has all of it.
  void check_not_written() const;
  void expect_no_writes();
  /// Throws StateError if the part of a parameter whose gradient arrived was taken already. Autograd completes a
  /// gradient once in a backward; only one that is nested in it brings more.
  void check_not_taken(size_t param) const;
  bool has_trainable() const;
  /// Adds the sizes in bytes of gradients that peers can read where they lie, if that is in shared memory.
  void add_lent_gradients(std::vector<size_t>& bytes) const;
  size_t unsharded_bytes() const;
  const std::shared_ptr<BlockPool>& pool() const { return pool_; }
  const std::shared_ptr<GatherStream>& gather_stream() const { return gather_.stream(); }
  const DataParallelAxes& axes() const { return options_.axes; }
  /// Whether gradients are all-reduced over replicas.
  bool has_replicas() const { return options_.axes.replica_axis.has_value(); }

 private:
  bool has_trainable(size_t part);
  void step(UnitStep step);
  void start_gather();
  void start_gather_in_place();
  void finish_unshard();
  void free_params(bool keeps_share);
  void report(UnitStep step) const;
  bool any_replaced() const;
  GatherFault fault() const;
  at::Tensor new_flat_shard(bool on_meta);
  at::ScalarType reduce_dtype(const ShardedParam& param) const;
  void check_trained_dtypes() const;
  GradientReduction::Options reduction_options(const std::vector<NamedParam>& params) const;
  std::vector<int64_t> gradient_bytes() const;
  bool keeps_writes() const;
  void take_memory();
  void drop_memory();
  void drop_gather();
  void check_gathered();

  Options options_;
  ParamLayout layout_;
  at::Device compute_device_;           // of the full parameters
  bool is_alias_;                       // the full parameters are the flat shard's memory
  std::vector<size_t> memory_offsets_;  // of the full parameters in their block, in bytes; its size at the end
  at::Tensor flat_shard_;               // and the stamp
  std::vector<ShardedParam> params_;
  std::shared_ptr<EngineSlots> slots_ = engine_slots();
  AllGatherFn custom_all_gather_;
  UnitGather gather_;
  GradientParts gradients_;
  std::shared_ptr<BlockPool> pool_;
  std::function<void(UnitStep)> report_;
  UnitNames names_;
  int64_t unit_ = 0;
  int64_t gathered_version_ = 0;
  UnitState state_ = UnitState::Sharded;
  GatherFault stamped_ = GatherFault::None;
};

}  // namespace tessera
