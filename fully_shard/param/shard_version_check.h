#pragma once
// What is to hold of a unit's parameters from one step to the next, and what the user is told where it does not: that
// their data are those which sharding gave them, that they have memory, that shards do not change between a forward and
// its backward, and that nobody writes the full parameters, whose values reshard drops.
//
//   gather           fault() goes into the tag (all_gather.h), so that the other ranks hear of it; note_gather()
//   its end          check_usable(): this rank's own fault, by the parameter's name; expect_no_writes()
//   forward          lost_write(); expect_no_writes() ... check_not_written(); versions() are kept for its backward
//   backward         lost_write(); has_changed_since(versions), check_unchanged_since(versions)
//   reshard          lost_write()
//
// Thread safety: for the thread that runs the rank's forward and backward.

#include <cstdint>
#include <string>
#include <vector>

#include "fully_shard/layout/gather_tag.h"
#include "fully_shard/param/unit_params.h"

namespace tessera {

/// What a forward computed with: how often each shard had been changed by then.
struct ParamVersions {
  std::vector<int64_t> each;
  int64_t sum = 0;
};

class ShardVersionCheck {
 public:
  /// `api`: the function that the user called, for messages. `keeps_writes`: what forward writes to a full parameter is
  /// not lost, and is the same on all ranks. `params` outlive it.
  ShardVersionCheck(std::string api, UnitParams& params, bool keeps_writes)
      : api_(std::move(api)), params_(params), keeps_writes_(keeps_writes) {}

  /// Why the parameters cannot be gathered at all.
  ShardFault fault() const;
  /// Throws StateError if there is such a reason.
  void check_usable() const;

  /// The full parameters will have the values that the shards have now.
  void note_gather() { gathered_version_ = params_.version(); }
  /// Whether shards were written since note_gather(): by a loader, say.
  bool has_newer_shards() const { return params_.version() != gathered_version_; }

  ParamVersions versions() const;
  /// Whether a shard changed since versions() gave `versions`.
  bool has_changed_since(const ParamVersions& versions) const { return params_.version() != versions.sum; }
  /// Throws StateError if one did.
  void check_unchanged_since(const ParamVersions& versions) const;

  /// While unsharded: full parameters are not to be written from now on.
  void expect_no_writes();
  /// Throws StateError if forward wrote one since: its shards would not keep that, or its replicas not have it.
  void check_not_written() const;
  /// Why values are lost when the full parameters go: one was written since expect_no_writes(). Empty if none was, or
  /// if they are the shards' memory. What is written through data(), which counts no writes, is not seen.
  std::string lost_write() const;

 private:
  std::string api_;
  UnitParams& params_;
  bool keeps_writes_;
  int64_t gathered_version_ = 0;
};

}  // namespace tessera
