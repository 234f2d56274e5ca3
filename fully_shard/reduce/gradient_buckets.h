#pragma once
// The reductions of one unit's gradients. Usually one, of all its parameters. A unit of replicate that is alone in its
// tree, as where only the whole model was given to replicate, has several, each of a run of its parameters: those of
// the last parameters, whose gradients backward computes first, start while backward goes on.
//
// Example, parameters of 3, 3, 1 and 5 MiB, at most 6 MiB together: parts {5}, {1, 3} and {3}; part 1 starts when both
// of its gradients are there and part 0 has started.
//
// Parts start in their order on every rank, in whichever order gradients come: one that waits for a gradient which does
// not come starts at the end of backward, and so do those behind it. As buckets of DistributedDataParallel do
// (torch/csrc/distributed/c10d/reducer.hpp).
//
// Thread safety: for the thread that runs the rank's backward.

#include <cstdint>
#include <span>
#include <vector>

#include "fully_shard/param/sharded_param.h"
#include "fully_shard/reduce/gradient_reduction.h"

namespace tessera {

/// What shares the first all-reduce of a backward: little, so that it starts early.
inline constexpr int64_t kFirstBucketBytes = int64_t{1024} * 1024;

/// The lengths of runs of at most `cap` bytes, from the last parameter on; one that is larger stands alone. The first
/// run has at most kFirstBucketBytes. {3, 3, 1, 5} MiB and 6 MiB: {1, 2, 1}.
std::vector<size_t> cut_by_bytes(const std::vector<int64_t>& bytes, int64_t cap);

class GradientBuckets {
 public:
  /// One part. `options` are those of all parameters.
  explicit GradientBuckets(GradientReduction::Options options);

  /// Parts of so many parameters each, from the last parameter on. Only while nothing is in flight or kept.
  void cut(const std::vector<size_t>& counts);

  size_t size() const { return parts_.size(); }
  GradientReduction& reduction(size_t part) { return parts_.at(part).reduction; }
  const GradientReduction& reduction(size_t part) const { return parts_.at(part).reduction; }
  /// The parameters of a part, of all of the unit's.
  std::span<ShardedParam> params_of(size_t part, std::span<ShardedParam> params) const {
    return params.subspan(parts_.at(part).first, parts_.at(part).count);
  }

  /// A backward begins: every parameter that requires a gradient is waited for.
  void begin(std::span<const ShardedParam> params);
  /// Whether the part of a parameter was taken already.
  bool was_taken(size_t param) const { return part_of(param) < next_; }
  /// The gradient of a parameter is complete.
  void arrived(size_t param) { --parts_[part_of(param)].waits_for; }
  /// The next part in order, if there is one that was not taken, and whether all its gradients are there.
  bool has_next() const { return next_ < parts_.size(); }
  bool is_next_complete() const { return has_next() && parts_[next_].waits_for == 0; }
  size_t take_next() { return next_++; }
  void end() { next_ = 0; }

 private:
  struct Part {
    size_t first = 0, count = 0;
    GradientReduction reduction;
    int64_t waits_for = 0;
  };

  size_t part_of(size_t param) const;

  GradientReduction::Options options_;
  std::vector<Part> parts_;
  size_t next_ = 0;
};

}  // namespace tessera
