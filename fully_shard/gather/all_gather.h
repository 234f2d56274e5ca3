#pragma once
// AllGather: all ranks' flat shards in one buffer, then copied to where parameters belong. The cast to the compute
// dtype comes first, so that only the narrow dtype is sent.
//
//   start() → wait() → check_tags() → finish()
//                    → release()               where the parameters are no longer wanted
//
// - Ranks that read each other's memory ("threads", "shm") cast what they read, into the parameters (in place).
// - Between forward and backward, parameters may come from post-forward shards of a smaller group, in their compute
//   dtypes. With 8 ranks and groups of 2, a rank keeps half of the parameters in place of an eighth.
// - Behind the parameters each rank sends a tag: which unit it gathers, and whether it can go on. Every rank throws
//   where tags differ. On CUDA, where reading them would stop the host, each rank checks its own parameters alone.
//
// Thread safety: for the thread that runs the rank's forward and backward.

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fully_shard/events/comm_overrides.h"
#include "fully_shard/layout/flat_layout.h"
#include "fully_shard/layout/gather_tag.h"
#include "fully_shard/layout/unit_context.h"
#include "fully_shard/memory/block_pool.h"
#include "fully_shard/memory/stream_lane.h"
#include "fully_shard/param/sharded_param.h"
#include "fully_shard/param/unit_params.h"

namespace tessera {

/// The names of the units of a tree, by number.
using UnitNames = std::shared_ptr<const std::vector<std::string>>;

class AllGather {
 public:
  /// `post_forward_ranks`: how many ranks keep a share between forward and backward; 0: none. Else collective.
  AllGather(UnitContextPtr context, const std::vector<ParamInfo>& params, int64_t post_forward_ranks);

  const std::shared_ptr<StreamLane>& stream() const { return stream_; }
  /// Layout of the parameters in a flat shard.
  const FlatLayout& shards() const { return shards_; }
  /// Makes zeros for a flat shard on the device of `options`, in memory that peers read, if the group does so.
  at::Tensor new_flat_shard(const at::TensorOptions& options);

  /// Issues the all-gather, of shares if this rank has one, on stream(), which has waited for the last write of the
  /// flat shard. That has the tag, and stays as it is until wait(), in place until wait_for_readers(), and with one
  /// rank, where finish() casts, until then. On the meta device only the tag is sent.
  void start(UnitParams& params, const GatherTag& tag, BlockPool& pool, const AllGatherFn& all_gather);
  void wait();
  /// Waits, where the parameters are no longer wanted, until the all-gather is over, failed or not.
  void discard();
  /// Returns when peers have read the flat shard, before it is written. After wait(). Throws CommError.
  void wait_for_readers() { pending_.wait_for_readers(); }
  /// Throws StateError unless all ranks sent the tag of `unit`. After wait().
  void check_tags(int64_t unit, const UnitNames& names) const;
  /// Returns whether a rank's tag says `fault`, as this one's says `own`: the same on all ranks, false on CUDA.
  bool is_tagged(ShardFault fault, ShardFault own) const;
  /// Copies the parameters, unless they are the shard's memory, and frees the buffers and the share.
  void finish(UnitParams& params, BlockPool& pool);
  /// Frees the buffers, and the parameters' memory of a gather in place.
  void release(UnitParams& params);

  bool keeps_post_forward_shard() const { return post_forward_.has_value(); }
  bool has_post_forward_shard() const { return post_forward_shard_.defined(); }
  /// Cuts this rank's share from the full parameters.
  void keep_post_forward_shard(const std::vector<ShardedParam>& params, int64_t unit);
  void drop_post_forward_shard() { post_forward_shard_ = at::Tensor(); }

 private:
  /// A layout that is gathered among the ranks of a group, and the buffers for it.
  struct Source {
    FlatLayout layout;
    std::shared_ptr<const ProcessGroupPtr> group;  // null where there is one rank
    PooledBuffer sent, gathered;

    Source(FlatLayout flat, std::shared_ptr<const ProcessGroupPtr> among, at::Device device);
  };
  /// Places of the ranks' tags.
  struct TagPlaces {
    const at::Tensor& in;
    int64_t offset, stride;
  };

  Source& source() { return has_post_forward_shard() ? *post_forward_ : flat_; }
  const Source& source() const { return has_post_forward_shard() ? *post_forward_ : flat_; }
  bool sends_shards_as_they_are() const { return !flat_.layout.is_in_bytes() || flat_.layout.has_same_dtypes(shards_); }
  bool can_use_segments();
  void leave_memory();
  const at::Tensor& as_sent(const at::Tensor& input, BlockPool& pool);
  const at::Tensor& encoded(const at::Tensor& flat_shard, const GatherTag& tag, BlockPool& pool);
  void start_in_place(UnitParams& params, BlockPool& pool);
  TagPlaces tag_places() const;
  bool reads_tags() const { return tag_places().in.device().is_cpu(); }
  bool tags_are_equal() const;
  std::vector<GatherTag> tags() const;

  UnitContextPtr context_;
  FlatLayout shards_;
  Source flat_;
  std::optional<Source> post_forward_;
  std::shared_ptr<StreamLane> stream_;
  at::Tensor post_forward_shard_;
  GatherTag post_forward_tag_;
  StreamEvent post_forward_cut_, issued_;
  Pending pending_;
  at::Tensor gathered_;
  TensorSegments segments_;  // of start_in_place()
  at::Tensor tags_;          // likewise
  std::optional<bool> group_supports_segments_;
  bool is_in_place_ = false;
};

}  // namespace tessera
