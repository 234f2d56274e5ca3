#pragma once
// UnitParams: the parameters of one unit, their memory, and invariants between steps.
//
// Shards are views of one flat buffer (flat_layout.h), followed by the tag (gather_tag.h), so the all-gather needs no
// copy-in. Full parameters share one block of the pool. Example: for a weight of 663 elements and a bias of 13 in
// float32 on the CPU, the block has the weight in bytes 0-2651 and the bias in 2688-2739, and ends at 2752.
//
//   gather           fault() goes into the tag, which informs the other ranks; note_gather()
//   end of gather    check_usable() reports this rank's own fault by parameter name; expect_no_writes()
//   forward          lost_write(); expect_no_writes() ... check_not_written(); keeps versions() for its backward
//   backward         lost_write(); has_changed_since(versions), check_unchanged_since(versions)
//   reshard          lost_write()
//
// Thread safety: for the thread that runs the rank's forward and backward.

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fully_shard/layout/gather_tag.h"
#include "fully_shard/param/sharded_param.h"

namespace tessera {

/// Versions of the shards that a forward used.
struct ParamVersions {
  std::vector<int64_t> each;
  int64_t sum = 0;
};

class UnitParams {
 public:
  /// Shards `params` into `flat_shard`, zeros in `layout`. `is_alias`: the full parameters use its memory.
  UnitParams(const std::vector<ParamInfo>& params, const FlatLayout& layout, at::Tensor flat_shard,
             const UnitContext& context, bool is_alias);
  UnitParams(const UnitParams&) = delete;
  UnitParams& operator=(const UnitParams&) = delete;

  const std::vector<ShardedParam>& all() const { return params_; }
  std::span<ShardedParam> all() { return params_; }
  const std::string& module() const { return params_.at(0).origin().module; }

  const at::Tensor& flat_shard() const { return flat_shard_; }
  bool is_on_meta() const { return flat_shard_.is_meta(); }
  bool is_alias() const { return is_alias_; }
  /// Moves the shards to `flat_shard`, zeros in `layout`. Only while sharded.
  void move_to(const FlatLayout& layout, at::Tensor flat_shard);
  /// Writes the tag into the flat shard, which must not be read at the same time.
  void tag(const GatherTag& tag);

  /// Allocates the full parameters, with undefined contents. Not if is_alias().
  void take_memory(BlockPool& pool);
  void drop_memory();
  void to_unsharded();
  void to_sharded();

  size_t unsharded_bytes() const;
  /// Returns whether `tensor` shares memory with a full parameter.
  bool lends_memory_to(const at::Tensor& tensor) const;

  /// Returns the reason that the parameters cannot be gathered, if any.
  ShardFault fault() const;
  /// Throws StateError if there is such a reason.
  void check_usable() const;

  /// Records the version of the shards that the full parameters will have.
  void note_gather() { gathered_version_ = version(); }
  /// Returns whether shards were written since note_gather().
  bool has_newer_shards() const { return version() != gathered_version_; }

  ParamVersions versions() const;
  /// Returns whether a shard changed since versions() returned `versions`.
  bool has_changed_since(const ParamVersions& versions) const { return version() != versions.sum; }
  /// Throws StateError if a shard changed since then.
  void check_unchanged_since(const ParamVersions& versions) const;

  /// Records versions, so that later writes of full parameters are detected. While unsharded.
  void expect_no_writes();
  /// Throws StateError if forward wrote a full parameter since then, and its shards or replicas would not have the
  /// change.
  void check_not_written() const;
  /// Returns a message about a write since expect_no_writes() that will be lost with the full parameters, or "". Does
  /// not detect writes through data(), which count no version.
  std::string lost_write() const;

 private:
  int64_t version() const;

  std::string api_;
  std::vector<ShardedParam> params_;
  at::Tensor flat_shard_;
  GatherTag tag_;                       // stored in flat_shard_
  std::vector<size_t> memory_offsets_;  // of full parameters in their block, in bytes, then the block's size
  bool is_alias_;
  bool
      keeps_writes_;  // whether writes to a full parameter reach its shard, and there are no replicas to differ from it
  int64_t gathered_version_ = 0;
};

}  // namespace tessera
