#pragma once
// AllGather: gathers all ranks' flat shards into one buffer and copies out the parameters. Casts to the compute dtype
// first, so that only the narrow dtype is sent.
//
//   start() → wait() → check_tags() → finish()
//                    → release()               if the parameters are no longer needed
//
// - Ranks that can read each other's memory ("threads", "shm") cast directly from the peer's shard into the parameters,
//   in place.
// - Between forward and backward, parameters may come from post-forward shards of a smaller group, in their compute
//   dtypes. With 8 ranks and groups of 2, a rank keeps half of the parameters instead of an eighth.
// - After the parameters, each rank sends a tag with the unit that it gathers and any fault. Every rank throws if tags
//   differ. On CUDA, where reading tags would block the host, each rank checks only its own parameters.
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

/// Names of the units of a tree, by number.
using UnitNames = std::shared_ptr<const std::vector<std::string>>;

class AllGather {
 public:
  /// `post_forward_ranks` is the group size of post-forward shards; 0: none. Collective unless 0.
  AllGather(UnitContextPtr context, const std::vector<ParamInfo>& params, int64_t post_forward_ranks);

  const std::shared_ptr<StreamLane>& stream() const { return stream_; }
  /// Layout of the parameters in a flat shard.
  const FlatLayout& shards() const { return shards_; }
  /// Makes zeros for a flat shard on the device of `options`, in memory that peers can read if the group supports it.
  at::Tensor new_flat_shard(const at::TensorOptions& options);

  /// Issues the all-gather, of the post-forward shard if there is one, on stream(). The stream must have waited for the
  /// last write of the flat shard. The shard contains the tag and must not change until wait(); if gathered in place,
  /// until wait_for_readers(); with one rank, where finish() casts, until finish(). On the meta device, sends only the
  /// tag.
  void start(UnitParams& params, const GatherTag& tag, BlockPool& pool, const AllGatherFn& all_gather);
  void wait();
  /// Waits until the all-gather ends, successfully or not, if the parameters are no longer needed.
  void discard();
  /// Waits until peers have read the flat shard, so that it may be written. Call after wait(). Throws CommError.
  void wait_for_readers() { pending_.wait_for_readers(); }
  /// Throws StateError unless all ranks sent the tag of `unit`. Call after wait().
  void check_tags(int64_t unit, const UnitNames& names) const;
  /// Returns whether any rank's tag has `fault`; `own` is this rank's. Equal on all ranks; always false on CUDA.
  bool is_tagged(ShardFault fault, ShardFault own) const;
  /// Copies out the parameters, unless they use the shard's memory, and frees the buffers and the post-forward shard.
  void finish(UnitParams& params, BlockPool& pool);
  /// Frees the buffers, and the parameters' memory of an in-place gather.
  void release(UnitParams& params);

  bool keeps_post_forward_shard() const { return post_forward_.has_value(); }
  bool has_post_forward_shard() const { return post_forward_shard_.defined(); }
  /// Copies this rank's post-forward shard from the full parameters.
  void keep_post_forward_shard(const std::vector<ShardedParam>& params, int64_t unit);
  void drop_post_forward_shard() { post_forward_shard_ = at::Tensor(); }

 private:
  /// Layout that is gathered over a group, and its buffers.
  struct Source {
    FlatLayout layout;
    std::shared_ptr<const ProcessGroupPtr> group;  // null for one rank
    PooledBuffer sent, gathered;

    Source(FlatLayout flat, std::shared_ptr<const ProcessGroupPtr> among, at::Device device);
  };
  /// Positions of the ranks' tags.
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
  TensorSegments segments_;  // for start_in_place()
  at::Tensor tags_;          // likewise
  std::optional<bool> group_supports_segments_;
  bool is_in_place_ = false;
};

}  // namespace tessera
