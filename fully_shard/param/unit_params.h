#pragma once
// The parameters of one unit, which change their state together, and their memory. All shards are views of one flat
// buffer (shard_format.h) with the tag behind them (all_gather.h), so the all-gather has no copy-in. The full
// parameters lie in one block of the pool, so that they come and go at once. Example, a weight of 663 elements and a
// bias of 13 in float32 on the CPU: the block has the weight in bytes 0-2651, the bias in 2688-2739, and ends at 2752.
//
// When they are in which state is up to their ParamGroup, as is what may be done with them in it
// (shard_version_check.h).
//
// Thread safety: for the thread that runs the rank's forward and backward.

#include <memory>
#include <span>
#include <vector>

#include "fully_shard/layout/data_parallel_axes.h"
#include "fully_shard/layout/gather_format.h"
#include "fully_shard/layout/gather_tag.h"
#include "fully_shard/layout/shard_format.h"
#include "fully_shard/param/sharded_param.h"

namespace tessera {

struct NamedParam {
  at::Tensor tensor;
  std::shared_ptr<const ParameterOrigin> origin;
  int64_t shard_dim = 0;
  SpecPtr tp_spec = nullptr;  // where tensor parallelism put it; null for a plain tensor
  GatherItem gather;          // how it is sent, and computed with

  /// Sizes of what one rank has of it while it is unsharded.
  at::IntArrayRef unsharded_sizes() const { return tp_spec ? tp_spec->local_sizes() : tensor.sizes(); }
};

class UnitParams {
 public:
  struct Options {
    DataParallelAxes axes;
    ParamLayout layout;  // of the flat shard
    at::Device device;   // of the full parameters
    bool is_alias;       // these are the flat shard's memory
  };

  /// Shards `params` into `flat_shard`, zeros as `format` says.
  UnitParams(const std::vector<NamedParam>& params, const ShardFormat& format, at::Tensor flat_shard,
             const Options& options);
  UnitParams(const UnitParams&) = delete;
  UnitParams& operator=(const UnitParams&) = delete;

  const std::vector<ShardedParam>& all() const { return params_; }
  std::span<ShardedParam> all() { return params_; }
  /// The module that has the first one, for messages about all.
  const std::string& module() const { return params_.at(0).origin().module; }

  const at::Tensor& flat_shard() const { return flat_shard_; }
  bool is_on_meta() const { return flat_shard_.is_meta(); }
  bool is_alias() const { return is_alias_; }
  /// The shards are in `flat_shard`, zeros as `format` says, from now on. Only while sharded.
  void move_to(const ShardFormat& format, at::Tensor flat_shard);
  /// Writes the tag into the flat shard, which must not be read meanwhile.
  void tag(const GatherTag& tag);

  /// The full parameters get memory; contents are undefined. Not where is_alias().
  void take_memory(BlockPool& pool);
  /// It is given back, while they are sharded.
  void drop_memory();
  /// All become full tensors, which have memory, and shards again, which ends that memory.
  void to_unsharded();
  void to_sharded();

  /// Grows with each change in place of a shard.
  int64_t version() const;
  bool has_trainable() const;
  /// Bytes that full parameters occupy now.
  size_t unsharded_bytes() const;
  /// Whether `tensor` is a full parameter or a view of one: memory that goes with to_sharded(), or is the shard's.
  bool lends_memory_to(const at::Tensor& tensor) const;

 private:
  std::vector<ShardedParam> params_;
  at::Tensor flat_shard_;
  GatherTag tag_;                       // in flat_shard_
  std::vector<size_t> memory_offsets_;  // of the full parameters in their block, in bytes; its size at the end
  bool is_alias_;
};

}  // namespace tessera
