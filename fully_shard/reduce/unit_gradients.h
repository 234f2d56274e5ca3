#pragma once
// UnitGradients: the gradients of a unit's parameters, until reducers have them.
//
//   begin() → autograd accumulates → next() or next_complete(), whose reducers collect()
//                                  → keep()                without communication, for a later backward's
//                                  → release()             after a backward that failed
//
// A unit of replicate that is alone in its tree has several reducers, each for a bucket: backward computes the
// gradients of the last parameters first, which are reduced while it goes on. Example, parameters of 3, 3, 1 and 5 MiB,
// at most 6 MiB together: buckets {5}, {1, 3} and {3}. Buckets start in their order on every rank, in whichever order
// gradients come; the end of backward starts the rest. After torch/csrc/distributed/c10d/reducer.hpp.
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

/// Cap of the first all-reduce of a backward, which starts early.
inline constexpr int64_t kFirstBucketBytes = int64_t{1024} * 1024;

/// Returns the lengths of runs of at most `cap` bytes (the first: kFirstBucketBytes), from the last parameter on.
/// {3, 3, 1, 5} MiB and 6 MiB: {1, 2, 1}.
std::vector<size_t> cut_by_bytes(const std::vector<int64_t>& bytes, int64_t cap);

class UnitGradients {
 public:
  /// `params` outlive it. `bucket_bytes`: as in ParamGroup::Options.
  UnitGradients(UnitParams& params, UnitContextPtr context, int64_t bucket_bytes);
  UnitGradients(const UnitGradients&) = delete;
  UnitGradients& operator=(const UnitGradients&) = delete;

  void set_reporter(std::function<void(FSDPEventKind)> report) { report_ = std::move(report); }
  /// Says whether no other unit of the tree has parameters, so that these get buckets. Only while nothing is in flight.
  void set_alone(bool is_alone);
  int64_t bucket_bytes() const { return bucket_bytes_; }

  /// Stashes the sharded gradients of trained parameters, so that backward accumulates unsharded ones.
  void begin();
  void restore();
  /// Keeps the accumulated gradients for a later reduction, without communication.
  void keep();
  /// Drops unsharded gradients and restores the sharded ones after a backward that failed. Does not wait.
  void release();
  /// Does the same, and waits for reductions in flight and discards them.
  void abort();

  bool has_buckets() const { return buckets_.size() > 1; }
  /// Notes that the gradient of a parameter is complete.
  void arrived(size_t param);
  /// Returns the next reducer, null after the last one. Throws StateError if parameters of several dtypes are trained.
  GradientReducer* next();
  /// Returns the same if all its gradients are there, else null.
  GradientReducer* next_complete();
  bool is_reducing() const;

  /// Throws StateError if a parameter was frozen while its gradient waits for the reduction.
  void check_none_frozen_since() const;
  /// Throws StateError if the bucket of a parameter whose gradient arrived was taken already, in an outer backward.
  void check_not_taken(size_t param) const;
  /// Adds the sizes in bytes of gradients that peers can read in place, if these are in shared memory.
  void add_exposed(std::vector<size_t>& bytes) const;

 private:
  struct Bucket {
    size_t first, count;
    GradientReducer reducer;
    int64_t waits_for = 0;
  };

  void cut(const std::vector<size_t>& counts);
  size_t find_bucket(size_t param) const;
  at::ScalarType reduce_dtype(const ShardedParam& param) const;
  void check_trained_dtypes() const;
  void report(FSDPEventKind step) const;

  UnitParams& params_;
  UnitContextPtr context_;
  int64_t bucket_bytes_;
  std::function<void(FSDPEventKind)> report_;
  std::deque<Bucket> buckets_;
  size_t next_ = 0;
};

}  // namespace tessera
