#pragma once
// How a unit's full parameters come together: from all ranks' flat shards, as they are or in a format of their own
// (gather_format.h), or, between forward and backward, from the shares of a smaller group (post_forward_shard.h).
//
//   start() → wait() → copy_out() → release()
//   start_in_place() → wait() → release()           where nothing has to be copied
//
// Thread safety: for the thread that runs the rank's forward and backward.

#include <memory>
#include <optional>
#include <vector>

#include "fully_shard/gather/all_gather.h"
#include "fully_shard/gather/post_forward_shard.h"
#include "fully_shard/layout/data_parallel_axes.h"
#include "fully_shard/layout/gather_format.h"
#include "fully_shard/layout/shard_format.h"
#include "fully_shard/memory/gather_stream.h"
#include "fully_shard/param/sharded_param.h"

namespace tessera {

class UnitGather {
 public:
  struct Options {
    DataParallelAxes axes;
    ParamLayout layout;                        // of the flat shards
    std::vector<at::ScalarType> shard_dtypes;  // of the parameters' shards
    std::vector<GatherItem> items;             // one a parameter
    at::Device device;                         // of the unsharded parameters
    /// Of the shares among that many ranks; 0: there are none.
    int64_t post_forward_ranks = 0;
    ParamLayout post_forward_layout = {};
  };

  /// With post_forward_ranks, all ranks of the mesh call it together.
  explicit UnitGather(Options options);

  /// Issues the all-gather, of shares if this rank has one, on stream(). `flat_shard` has the tag already, and
  /// stream() has waited for its last write. One on the meta device is not sent, only the tag.
  void start(const at::Tensor& flat_shard, const GatherTag& tag, BlockPool& pool, const AllGatherFn& all_gather);
  /// Whether start_in_place() can take the place of start(): where ranks read each other's memory ("threads", "shm"),
  /// and all parameters are sharded on dim 0 and sent alike, or all as they are, peers' rows come straight to where
  /// they belong.
  bool can_gather_in_place(const at::Tensor& flat_shard, const AllGatherFn& all_gather);
  /// Where the shards lie in a flat shard.
  const ShardFormat& shards() const { return shards_; }
  /// Zeros in which to keep a flat shard, on the device of `options`. Those in pageable memory of the CPU lie where
  /// peers can read them, if the group's ranks do so.
  at::Tensor new_flat_shard(const at::TensorOptions& options);
  /// The parameters have memory already.
  void start_in_place(const at::Tensor& flat_shard, BlockPool& pool, const std::vector<ShardedParam>& params);
  /// From start_in_place() to release().
  bool is_in_place() const { return is_in_place_; }
  void wait();
  /// In place of wait() where nobody wants the parameters any more: returns when the all-gather is over, failed or not.
  void discard();
  /// Returns when peers have read the flat shard of start_in_place() too: before it is written, or the parameters are
  /// seen as shards. After wait(). Throws CommError.
  void wait_for_readers() { gather_.wait_for_readers(); }
  /// Throws StateError unless all ranks sent the tag of `unit`. After wait().
  void check_tags(int64_t unit, const UnitNames& names) { current().check_tags(unit, names); }
  /// As ShardGather::is_tagged.
  bool is_tagged(ShardFault fault, ShardFault own) { return current().is_tagged(fault, own); }
  /// The parameters have memory. After wait(); not in place.
  void copy_out(const std::vector<ShardedParam>& params);
  void release();

  bool can_keep_post_forward_shard() const { return post_forward_ != nullptr; }
  bool keeps_post_forward_shard() const { return post_forward_ && post_forward_->is_at_hand(); }
  void keep_post_forward_shard(const std::vector<ShardedParam>& params, int64_t unit);
  void drop_post_forward_shard();

  const std::shared_ptr<GatherStream>& stream() const { return stream_; }

 private:
  void start_whole(const at::Tensor& flat_shard, const GatherTag& tag, BlockPool& pool, const AllGatherFn& all_gather);
  bool is_sent_as_it_is() const;
  bool can_use_segments();
  ShardGather& current() { return keeps_post_forward_shard() ? post_forward_->gather() : gather_; }

  Options options_;
  ShardFormat shards_;
  std::optional<GatherFormat> format_;
  std::vector<std::vector<BlockCopy>> copies_;  // where there is no format
  ShardGather gather_;
  std::unique_ptr<PostForwardShard> post_forward_;
  std::shared_ptr<GatherStream> stream_;
  StreamEvent share_cut_, issued_;
  at::Tensor gathered_;
  std::optional<bool> group_supports_segments_;
  bool is_in_place_ = false;
};

}  // namespace tessera
