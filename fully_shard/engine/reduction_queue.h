#pragma once
// ReductionQueue: runs the reductions of a tree's units in order, and decides which share an all-reduce.
//
// During backward, at most one reduce-scatter is in flight, followed (with HSDP) by one all-reduce, and copies to the
// host. A unit's copy-in waits for the previous unit's reduce-scatter and reuses its buffer.
//
// Units of replicate share all-reduces of up to bucket_bytes; the first one in a backward has up to kFirstBucketBytes.
// A larger unit is reduced alone, in place. Example: units of 10, 10, 30, 4 and 1 MiB in backward order, with a limit
// of 25 MiB: {10} | {10} | {30} | {4, 1}. Elements are summed in rank order, so buckets do not affect gradients. Like
// bucket_cap_mb of DistributedDataParallel.
//
// Thread safety: for the thread that runs the rank's backward.

#include <memory>
#include <optional>
#include <vector>

#include "fully_shard/engine/param_group.h"

namespace tessera {

class ReductionQueue {
 public:
  ReductionQueue() = default;
  ReductionQueue(const ReductionQueue&) = delete;
  ReductionQueue& operator=(const ReductionQueue&) = delete;
  /// Discards the remains of a failed backward, ordered before later work of the compute stream. Logs failures to
  /// stderr.
  ~ReductionQueue();

  /// Reduces all gradients of a unit, or those that push_complete() left. Collective.
  void push(const std::shared_ptr<ParamGroup>& group, const GradientSettings& settings);
  /// Reduces the complete buckets, up to the first incomplete one.
  void push_complete(const std::shared_ptr<ParamGroup>& group, const GradientSettings& settings);
  /// Issues the collected reductions.
  void flush();
  /// Waits for all reductions, and until no peer reads this rank's gradients.
  void drain();
  /// Returns whether nothing was added since drain().
  bool is_drained() const;
  /// Drops all reductions, after the units' abort_backward().
  void clear();
  /// Makes the compute stream wait for the reductions, before a unit's memory is freed.
  void await_streams() const;

 private:
  /// A reducer and the unit that owns it.
  struct Item {
    std::shared_ptr<ParamGroup> group;
    GradientReducer* reducer;
  };
  /// One item, or several that share an all-reduce.
  struct Bucket {
    std::vector<Item> items;
    at::Tensor buffer = {};  // for several items
    Pending pending = {};
  };

  void push(Item item, const GradientSettings& settings);
  static const std::shared_ptr<StreamLane>& lane(const Bucket& bucket);
  void issue(Bucket bucket);
  void issue_together(Bucket& bucket) const;
  void finish(const Item& item);
  void finish(Bucket bucket);
  void advance();
  void drain_streams();

  std::shared_ptr<CommOverrides> slots_ = comm_overrides();
  std::vector<Item> collected_;
  int64_t collected_bytes_ = 0;
  bool is_first_ = true;  // whether no bucket has been filled in this backward
  std::optional<Bucket> scattering_, reducing_;
  std::vector<Item> scattered_;                       // peers may still read these
  std::vector<Item> copying_;                         // being copied to the host
  std::vector<std::shared_ptr<StreamLane>> streams_;  // used for reductions since they were drained
};

}  // namespace tessera
