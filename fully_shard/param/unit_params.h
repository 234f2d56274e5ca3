#pragma once
// UnitParams: the parameters of one unit, their memory, and what must hold of them from step to step.
//
// Shards are views of one flat buffer (flat_layout.h) with the tag behind them (gather_tag.h), so the all-gather has no
// copy-in. Full parameters lie in one block of the pool. Example, a weight of 663 elements and a bias of 13 in float32
// on the CPU: the block has the weight in bytes 0-2651, the bias in 2688-2739, and ends at 2752.
//
//   gather           fault() goes into the tag, so that the other ranks hear of it; note_gather()
//   its end          check_usable(): this rank's own fault, by the parameter's name; expect_no_writes()
//   forward          lost_write(); expect_no_writes() ... check_not_written(); versions() are kept for its backward
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

/// Versions of the shards that a forward computed with.
struct ParamVersions {
  std::vector<int64_t> each;
  int64_t sum = 0;
};

class UnitParams {
 public:
  /// Shards `params` into `flat_shard`, zeros as `layout` says. `is_alias`: the full parameters are its memory.
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
  /// Moves the shards to `flat_shard`, zeros as `layout` says. Only while sharded.
  void move_to(const FlatLayout& layout, at::Tensor flat_shard);
  /// Writes the tag into the flat shard, which must not be read meanwhile.
  void tag(const GatherTag& tag);

  /// Gives the full parameters memory; contents are undefined. Not where is_alias().
  void take_memory(BlockPool& pool);
  void drop_memory();
  void to_unsharded();
  void to_sharded();

  size_t unsharded_bytes() const;
  /// Returns whether `tensor` shares memory with a full parameter.
  bool lends_memory_to(const at::Tensor& tensor) const;

  /// Says why the parameters cannot be gathered at all.
  ShardFault fault() const;
  /// Throws StateError if there is such a reason.
  void check_usable() const;

  /// Notes the values of the shards, which the full parameters will have.
  void note_gather() { gathered_version_ = version(); }
  /// Returns whether shards were written since note_gather().
  bool has_newer_shards() const { return version() != gathered_version_; }

  ParamVersions versions() const;
  /// Returns whether a shard changed since versions() gave `versions`.
  bool has_changed_since(const ParamVersions& versions) const { return version() != versions.sum; }
  /// Throws StateError if one did.
  void check_unchanged_since(const ParamVersions& versions) const;

  /// Expects that full parameters are not written from now on. While unsharded.
  void expect_no_writes();
  /// Throws StateError if forward wrote one since, where its shards would not keep that, or its replicas not have it.
  void check_not_written() const;
  /// Says which write since expect_no_writes() is lost when the full parameters go; empty if none is. Writes through
  /// data(), which counts none, are not seen.
  std::string lost_write() const;

 private:
  int64_t version() const;

  std::string api_;
  std::vector<ShardedParam> params_;
  at::Tensor flat_shard_;
  GatherTag tag_;                       // in flat_shard_
  std::vector<size_t> memory_offsets_;  // of the full parameters in their block, in bytes; its size at the end
  bool is_alias_;
  bool keeps_writes_;  // to a full parameter: they are not lost, and no replica would have others
  int64_t gathered_version_ = 0;
};

}  // namespace tessera
