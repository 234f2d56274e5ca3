#pragma once
// The reductions of a tree's units, in order, and which of them share an all-reduce.
//
// One reduce-scatter is in flight while backward goes on, and behind it (HSDP) one all-reduce: a unit's copy-in waits
// for the reduce-scatter of the unit before, whose buffer it gets. Behind both are copies to the host, where an
// offload policy asks for them.
//
// Units of replicate have nothing to scatter. Their gradients are collected in the order in which backward leaves the
// units, until the next would make them more than the unit's bucket_bytes; then all go into one buffer and one
// all-reduce. The first of a backward goes at kFirstBucketBytes. A unit that is as large as that goes alone, from where
// its gradients stay. Example, units of 10, 10, 30, 4 and 1 MiB in the order of backward, 25 MiB at most:
//
//   {10} | {10} | {30} | {4, 1}
//
// Every element is added up over the ranks in their order, however units are put together, so gradients do not depend
// on it. And it depends on sizes alone, so ranks agree on it. As bucket_cap_mb of DistributedDataParallel.
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
  /// Throws away what a backward that failed left. On a device with streams, what the computing one is given next comes
  /// after it; reports on stderr that a stream could not be told to wait.
  ~ReductionQueue();

  /// All gradients of a unit, or what push_complete() left of them. Collective.
  void push(const std::shared_ptr<ParamGroup>& group, const GradientSettings& settings);
  /// The buckets whose gradients are complete, and before which none is missing.
  void push_complete(const std::shared_ptr<ParamGroup>& group, const GradientSettings& settings);
  /// Issues what was collected.
  void flush();
  /// Waits for all, and until no peer reads this rank's gradients.
  void drain();
  /// Whether nothing came since drain().
  bool is_drained() const;
  /// After the units' abort_backward().
  void clear();
  /// Before a unit's memory goes: what the computing stream is given next comes after what was given to others.
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
  static const std::shared_ptr<StreamLane>& stream_of(const Bucket& bucket);
  void issue(Bucket bucket);
  void issue_together(Bucket& bucket) const;
  void finish(const Item& item);
  void finish(Bucket bucket);
  void advance();
  void discard_in_flight();
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
