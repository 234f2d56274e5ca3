#pragma once
// How a unit's full parameters come together: all ranks' flat shards in one buffer, from one all-gather, with the cast
// to the compute dtype before it so that only the narrow dtype is sent; then copied to where parameters belong.
//
//   start() → wait() → copy_out() → release()
//   start_in_place() → wait() → release()           where nothing has to be copied
//
// Ranks that read each other's memory ("threads", "shm") cast what they read, in the pass that writes it to the
// parameters. Between forward and backward the parameters may come from shares of a smaller group in place of the flat
// shards (post_forward_group.h). A share has the parameters as forward computed with them: each in its compute dtype,
// whatever was sent for forward. So it is for that forward's backward alone.
//
// Behind the parameters each rank sends a tag: the number of the unit that it gathers and whether it can go on.
// So ranks that gather different units of equal size, or of which one found its parameters replaced, or changed since
// the forward whose backward uses them, all learn of it in the collective itself, and all of them throw. (On CUDA that
// would stop the host; there only the own rank checks.)
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

/// The unit of a tag, in words: all units of the tree by number. Shared by the tree.
using UnitNames = std::shared_ptr<const std::vector<std::string>>;

class AllGather {
 public:
  /// `post_forward_ranks`: how many ranks keep a share of the parameters between forward and backward; 0: none do. With
  /// it, all ranks of the mesh call it together.
  AllGather(UnitContextPtr context, const std::vector<NamedParam>& params, int64_t post_forward_ranks);

  const std::shared_ptr<StreamLane>& stream() const { return stream_; }
  /// Layout of the parameters in a flat shard.
  const FlatLayout& shards() const { return shards_; }
  /// Zeros in which to keep a flat shard, on the device of `options`. Those in pageable memory of the CPU lie where
  /// peers can read them, if the group's ranks do so.
  at::Tensor new_flat_shard(const at::TensorOptions& options);

  /// Issues the all-gather, of shares if this rank has one, on stream(). `flat_shard` has the tag already, stays as it
  /// is until wait(), and stream() has waited for its last write. One on the meta device is not sent, only the tag.
  /// With one rank there is no group, and nothing but the cast.
  void start(const at::Tensor& flat_shard, const GatherTag& tag, BlockPool& pool, const AllGatherFn& all_gather);
  /// Returns whether start_in_place() can take the place of start(): where ranks read each other's memory, and all
  /// parameters are sharded on dim 0 and sent in one dtype, or all as they are, peers' rows come straight to where they
  /// belong.
  bool can_gather_in_place(const at::Tensor& flat_shard, const AllGatherFn& all_gather);
  /// The parameters have memory already. `flat_shard` stays as it is until wait_for_readers().
  void start_in_place(const at::Tensor& flat_shard, BlockPool& pool, const std::vector<ShardedParam>& params);
  /// From start_in_place() to release().
  bool is_in_place() const { return is_in_place_; }
  void wait();
  /// Takes the place of wait() where the parameters are no longer wanted: returns when the all-gather is over, failed
  /// or not.
  void discard();
  /// Returns when peers have read the flat shard of start_in_place() too: before it is written, or the parameters are
  /// seen as shards. After wait(). Throws CommError.
  void wait_for_readers() { pending_.wait_for_readers(); }
  /// Throws StateError unless all ranks sent the tag of `unit`. After wait().
  void check_tags(int64_t unit, const UnitNames& names) const;
  /// Whether a rank's tag says `fault`, as this one's says `own`: the same on all ranks, and false where none reads
  /// tags. After wait().
  bool is_tagged(ShardFault fault, ShardFault own) const;
  /// The parameters have memory. After wait(); not in place.
  void copy_out(const std::vector<ShardedParam>& params) const;
  void release();

  bool can_keep_share() const { return post_forward_.has_value(); }
  bool has_share() const { return share_.defined(); }
  /// Cuts this rank's share from the full parameters.
  void keep_share(const std::vector<ShardedParam>& params, int64_t unit);
  void drop_share() { share_ = at::Tensor(); }

 private:
  /// A layout that is gathered among the ranks of a group, and the buffers for it.
  struct Source {
    FlatLayout layout;
    std::shared_ptr<const ProcessGroupPtr> group;  // null where there is one rank
    PooledBuffer sent, gathered;

    Source(FlatLayout flat, std::shared_ptr<const ProcessGroupPtr> among, at::Device device);
  };
  /// Where the ranks' tags are.
  struct TagPlaces {
    const at::Tensor& in;
    int64_t offset, stride;
  };

  Source& source() { return has_share() ? *post_forward_ : flat_; }
  const Source& source() const { return has_share() ? *post_forward_ : flat_; }
  bool sends_shards_as_they_are() const { return !flat_.layout.is_in_bytes() || flat_.layout.has_dtypes_of(shards_); }
  bool can_use_segments();
  void leave_memory();
  const at::Tensor& as_sent(const at::Tensor& input, BlockPool& pool);
  const at::Tensor& encoded(const at::Tensor& flat_shard, const GatherTag& tag, BlockPool& pool);
  void set_segments(const std::vector<ShardedParam>& params);
  TagPlaces tag_places() const;
  bool reads_tags() const { return tag_places().in.device().is_cpu(); }
  bool tags_are_equal() const;
  std::vector<GatherTag> tags() const;

  UnitContextPtr context_;
  FlatLayout shards_;
  Source flat_;
  std::optional<Source> post_forward_;
  std::shared_ptr<StreamLane> stream_;
  at::Tensor share_;
  GatherTag share_tag_;
  StreamEvent share_cut_, issued_;
  Pending pending_;
  at::Tensor gathered_;
  TensorSegments segments_;  // of start_in_place()
  at::Tensor tags_;          // likewise
  std::optional<bool> group_supports_segments_;
  bool is_in_place_ = false;
};

}  // namespace tessera
