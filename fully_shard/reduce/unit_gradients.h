#pragma once
// The gradients of a unit's parameters, from the start of its backward to the sharded gradients that an optimizer sees:
//
//   begin() → autograd accumulates → collect() → start() → start_all_reduce() → finish()
//                                  → keep()                without communication, for a later collect()
//                                  → release()           after a backward that failed
//
// collect() to finish() are called for each part of the parameters (gradient_buckets.h); a unit has one as a rule. When
// they are called is up to the unit's hooks and the queue of its tree (reduction_queue.h).
//
// Thread safety: for the thread that runs the rank's backward.

#include <functional>
#include <span>
#include <vector>

#include "fully_shard/events/sharded_state.h"
#include "fully_shard/param/unit_params.h"
#include "fully_shard/reduce/gradient_buckets.h"

namespace tessera {

class UnitGradients {
 public:
  struct Options {
    GradientReduction::Options reduction;  // of all parameters
    bool has_mixed_dtypes;                 // of the parameters
    int64_t bucket_bytes;                  // as in ParamGroup::Options
  };

  /// `params` outlive it.
  UnitGradients(UnitParams& params, Options options);
  UnitGradients(const UnitGradients&) = delete;
  UnitGradients& operator=(const UnitGradients&) = delete;

  /// `report` sees every step.
  void set_reporter(std::function<void(FSDPEventKind)> report) { report_ = std::move(report); }
  /// Whether no other unit of the tree has parameters: then they are reduced in parts, if bucket_bytes says so. Only
  /// while nothing is in flight.
  void set_alone(bool is_alone);
  int64_t bucket_bytes() const { return options_.bucket_bytes; }
  GradientBuckets& parts() { return parts_; }
  GradientReduction& reduction(size_t part) { return parts_.reduction(part); }
  const GradientReduction& reduction(size_t part) const { return parts_.reduction(part); }
  bool has_trainable() const { return params_.has_trainable(); }

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

  /// The steps of GradientReduction for one part. collect() returns whether there is anything to reduce, and throws
  /// StateError if parameters of several dtypes are trained; start_all_reduce() whether an all-reduce is in flight.
  /// After either of the last two is_copying() says whether finish() is to be called (again).
  bool collect(size_t part, const GradientSettings& settings);
  void start(size_t part, BlockPool& pool);
  void start_in(size_t part, const at::Tensor& buffer);
  bool start_all_reduce(size_t part);
  void finish(size_t part);
  bool is_copying(size_t part) const { return reduction(part).is_copying(); }
  /// Whether a part is in flight.
  bool is_reducing() const;

  /// Throws StateError if a parameter was frozen while its gradient waits for the reduction: nobody would reduce it
  /// now, and a later one would add it to gradients of another time.
  void check_none_frozen_since() const;
  /// Throws StateError if the part of a parameter whose gradient arrived was taken already. Autograd completes a
  /// gradient once in a backward; only one that is nested in it brings more.
  void check_not_taken(size_t param) const;
  /// Drops the gradient that autograd has just accumulated.
  void drop_arrived(size_t param) { params_.all()[param].drop_accumulated(); }
  /// Lets the sharded gradient that autograd has just accumulated lie as its parameter does. Collective where it does
  /// not.
  void place_sharded(size_t param) { params_.all()[param].place_sharded_grad(); }
  /// Adds the sizes in bytes of gradients that peers can read where they lie, if that is in shared memory.
  void add_exposed(std::vector<size_t>& bytes) const;

 private:
  std::span<ShardedParam> params_of(size_t part) const { return parts_.params_of(part, params_.all()); }
  bool has_trainable(size_t part) const;
  at::ScalarType reduce_dtype(const ShardedParam& param) const;
  std::vector<int64_t> bytes_of_each() const;
  void check_trained_dtypes() const;
  void report(FSDPEventKind step) const;

  UnitParams& params_;
  Options options_;
  GradientBuckets parts_;
  std::function<void(FSDPEventKind)> report_;
};

}  // namespace tessera
