#pragma once
// UnitGradients: the gradients of a unit's parameters, before reducers take them.
//
//   begin() → autograd accumulates → next() or next_complete(), whose reducers collect()
//                                  → keep()                without communication, for a later backward
//                                  → release()             after a backward that failed
//
// A replicate unit that is alone in its tree has one reducer per bucket. Backward computes the gradients of the last
// parameters first, and they are reduced while it continues. Example: parameters of 3, 3, 1 and 5 MiB with a limit of 6
// MiB form the buckets {5}, {1, 3} and {3}. Buckets start in the same order on every rank, whatever the order of
// gradients; the end of backward starts the rest. Source: torch/csrc/distributed/c10d/reducer.hpp.
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

/// Size limit of the first all-reduce of a backward, which starts early.
inline constexpr int64_t kFirstBucketBytes = int64_t{1024} * 1024;

/// Returns the lengths of runs of at most `cap` bytes (kFirstBucketBytes for the first), starting at the last
/// parameter. For {3, 3, 1, 5} MiB and 6 MiB: {1, 2, 1}.
std::vector<size_t> cut_by_bytes(const std::vector<int64_t>& bytes, int64_t cap);

class UnitGradients {
 public:
  /// `params` must outlive this. `bucket_bytes` is that of ParamGroup::Options.
  UnitGradients(UnitParams& params, UnitContextPtr context, int64_t bucket_bytes);
  UnitGradients(const UnitGradients&) = delete;
  UnitGradients& operator=(const UnitGradients&) = delete;

  void set_reporter(std::function<void(FSDPEventKind)> report) { report_ = std::move(report); }
  /// Sets whether no other unit of the tree has parameters, so that this one uses buckets. Only with nothing in flight.
  void set_alone(bool is_alone);
  int64_t bucket_bytes() const { return bucket_bytes_; }

  /// Stashes the sharded gradients of trained parameters, so that backward accumulates unsharded ones.
  void begin();
  void restore();
  /// Keeps the accumulated gradients for a later reduction. Does not communicate.
  void keep();
  /// Drops unsharded gradients and restores the sharded ones after a failed backward. Does not wait.
  void release();
  /// Does the same, and also waits for reductions in flight and discards them.
  void abort();

  bool has_buckets() const { return buckets_.size() > 1; }
  /// Records that the gradient of a parameter is complete.
  void arrived(size_t param);
  /// Returns the next reducer, or null after the last. Throws StateError if trained parameters have several dtypes.
  GradientReducer* next();
  /// Returns the next reducer if all its gradients are complete, else null.
  GradientReducer* next_complete();
  bool is_reducing() const;

  /// Throws StateError if a parameter was frozen while its gradient was waiting for the reduction.
  void check_none_frozen_since() const;
  /// Throws StateError if an outer backward already took the bucket of a parameter whose gradient arrived.
  void check_not_taken(size_t param) const;
  /// Adds the sizes in bytes of gradients that peers can read in place, if they are in shared memory.
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
