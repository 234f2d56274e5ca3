#pragma once
// The gradients of a unit's parameters, from the start of its backward until reducers have them:
//
//   begin() → autograd accumulates → next() or next_complete(), whose reducers collect()
//                                  → keep()                without communication, for a later backward's
//                                  → release()             after a backward that failed
//
// Usually one reducer has all parameters. A unit of replicate that is alone in its tree, as where only the whole model
// was given to replicate, has several, each for a bucket of them: the gradients of the last parameters, which backward
// computes first, are reduced while backward goes on.
//
// Example, parameters of 3, 3, 1 and 5 MiB, at most 6 MiB together: buckets {5}, {1, 3} and {3}; bucket 1 starts when
// both of its gradients are there and bucket 0 has started.
//
// Buckets start in their order on every rank, in whichever order gradients come: one that waits for a gradient which
// does not come starts at the end of backward, and so do those behind it. As buckets of DistributedDataParallel do
// (torch/csrc/distributed/c10d/reducer.hpp).
//
// Thread safety: for the thread that runs the rank's backward.

#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "fully_shard/events/sharded_state.h"
#include "fully_shard/param/unit_params.h"
#include "fully_shard/reduce/gradient_reducer.h"

namespace tessera {

/// What shares the first all-reduce of a backward: little, so that it starts early.
inline constexpr int64_t kFirstBucketBytes = int64_t{1024} * 1024;

/// The lengths of runs of at most `cap` bytes, from the last parameter on; one that is larger stands alone. The first
/// run has at most kFirstBucketBytes. {3, 3, 1, 5} MiB and 6 MiB: {1, 2, 1}.
std::vector<size_t> cut_by_bytes(const std::vector<int64_t>& bytes, int64_t cap);

class UnitGradients {
 public:
  struct Options {
    bool has_mixed_dtypes;  // of the parameters
    int64_t bucket_bytes;   // as in ParamGroup::Options
  };

  /// `params` outlive it.
  UnitGradients(UnitParams& params, UnitContextPtr context, Options options);
  UnitGradients(const UnitGradients&) = delete;
  UnitGradients& operator=(const UnitGradients&) = delete;

  /// `report` sees every step.
  void set_reporter(std::function<void(FSDPEventKind)> report) { report_ = std::move(report); }
  /// Whether no other unit of the tree has parameters: then they are reduced in buckets, if bucket_bytes says so. Only
  /// while nothing is in flight.
  void set_alone(bool is_alone);
  int64_t bucket_bytes() const { return options_.bucket_bytes; }

  /// Sets sharded gradients aside, of parameters that require one, so that backward accumulates unsharded ones.
  void begin();
  /// Without reduction: gradients that were set aside are the parameters' again.
  void restore();
  /// Without communication: keeps the accumulated gradients for a later reduction.
  void keep();
  /// Drops unsharded gradients and puts back the sharded ones, where zero_grad() and optimizers find them: once a
  /// backward has failed. Nothing is waited for.
  void release();
  /// The same, and reductions in flight are waited for and thrown away.
  void abort();

  bool has_buckets() const { return buckets_.size() > 1; }
  /// The gradient of a parameter is complete.
  void arrived(size_t param);
  /// The next reducer in order, and null after the last one, which ends the unit's backward. Throws StateError if
  /// parameters of several dtypes are trained.
  GradientReducer* next();
  /// The same if all its gradients are there, else null.
  GradientReducer* next_complete();
  /// Whether a reduction is in flight.
  bool is_reducing() const;

  /// Throws StateError if a parameter was frozen while its gradient waits for the reduction: it would not be reduced
  /// now, and a later one would add it to gradients of another time.
  void check_none_frozen_since() const;
  /// Throws StateError if the bucket of a parameter whose gradient arrived was taken already. Autograd completes a
  /// gradient once in a backward; only one that is nested in it brings more.
  void check_not_taken(size_t param) const;
  /// Adds the sizes in bytes of gradients that peers can read where they lie, if that is in shared memory.
  void add_exposed(std::vector<size_t>& bytes) const;

 private:
  struct Bucket {
    size_t first, count;
    GradientReducer reducer;
    int64_t waits_for = 0;
  };

  void cut(const std::vector<size_t>& counts);
  size_t bucket_of(size_t param) const;
  at::ScalarType reduce_dtype(const ShardedParam& param) const;
  std::vector<int64_t> bytes_of_each() const;
  void check_trained_dtypes() const;
  void report(FSDPEventKind step) const;

  UnitParams& params_;
  UnitContextPtr context_;
  Options options_;
  std::function<void(FSDPEventKind)> report_;
  std::deque<Bucket> buckets_;
  size_t next_ = 0;
};

}  // namespace tessera
