#pragma once
// ReductionQueue: the reductions of a tree's units, in order, and which of them share an all-reduce.
//
// One reduce-scatter is in flight while backward goes on, behind it (HSDP) one all-reduce, and copies to the host. A
// unit's copy-in waits for the reduce-scatter of the unit before, whose buffer it gets.
//
// Units of replicate share an all-reduce of at most bucket_bytes, the first of a backward of kFirstBucketBytes. A
// larger unit goes alone, from where its gradients stay. Example, units of 10, 10, 30, 4 and 1 MiB in the order of
// backward, 25 MiB at most: {10} | {10} | {30} | {4, 1}. Elements are added up in the order of ranks, so gradients do
// not depend on it. As bucket_cap_mb of DistributedDataParallel.
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
  /// Discards what a backward that failed left, before later work of the computing stream. Reports failures on stderr.
  ~ReductionQueue();

  /// Reduces all gradients of a unit, or what push_complete() left of them. Collective.
  void push(const std::shared_ptr<ParamGroup>& group, const GradientSettings& settings);
  /// Reduces the buckets whose gradients are complete, and before which none is missing.
  void push_complete(const std::shared_ptr<ParamGroup>& group, const GradientSettings& settings);
  /// Issues what was collected.
  void flush();
  /// Waits for all, and until no peer reads this rank's gradients.
  void drain();
  /// Returns whether nothing came since drain().
  bool is_drained() const;
  /// Forgets all reductions, after the units' abort_backward().
  void clear();
  /// Makes the computing stream wait for the reductions, before a unit's memory goes.
  void await_streams() const;

 private:
  /// A reducer, and the unit that owns it.
  struct Item {
    std::shared_ptr<ParamGroup> group;
    GradientReducer* reducer;
  };
  /// One item, or several in one all-reduce.
  struct Bucket {
    std::vector<Item> items;
    at::Tensor buffer = {};  // of several
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
  bool is_first_ = true;  // no bucket was filled in this backward
  std::optional<Bucket> scattering_, reducing_;
  std::vector<Item> scattered_;                       // which peers may still read
  std::vector<Item> copying_;                         // to the host
  std::vector<std::shared_ptr<StreamLane>> streams_;  // on which something was reduced since they were drained
};

}  // namespace tessera
