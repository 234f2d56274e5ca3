#pragma once
// The collective half of a unit's unshard: the flat shards of all ranks in one buffer, from one all-gather, with the
// cast to the compute dtype before it so that only the narrow dtype is sent. Where ranks read each other's memory they
// cast what they read, in the pass that writes it to the parameters.
//
// Behind the parameters each rank sends a tag: the number of the unit that it gathers and whether it can go on.
// So ranks that gather different units of equal size, or of which one found its parameters replaced, or changed since
// the forward whose backward uses them, all learn of it in the collective itself, and all of them throw. (On CUDA that
// would stop the host; there only the own rank checks.)

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "fully_shard/events/comm_overrides.h"
#include "fully_shard/layout/gather_format.h"
#include "fully_shard/layout/gather_tag.h"
#include "fully_shard/layout/param_layout.h"
#include "fully_shard/memory/block_pool.h"
#include "fully_shard/memory/stream_keep_alive.h"

namespace tessera {

/// The unit of a tag, in words: all units of the tree by number. Shared by the tree.
using UnitNames = std::shared_ptr<const std::vector<std::string>>;

/// Each parameter's copies out of the gathered buffer.
std::vector<std::vector<BlockCopy>> gather_copies(const ParamLayout& layout);

class ShardGather {
 public:
  /// `layout`: what each rank's flat shard, of gather_numel(layout) elements, holds.
  ShardGather(const ParamLayout& layout, const at::TensorOptions& compute_options);
  /// Each rank sends `bytes` bytes, a multiple of 16, and a tag (gather_format.h).
  ShardGather(int64_t num_ranks, int64_t bytes, at::Device device);

  /// A buffer to send from, where the shard itself is not sent; contents are undefined. Until release().
  const at::Tensor& acquire_input(BlockPool& pool) { return cast_.acquire(pool); }
  /// Issues the all-gather of `input`, which may be of another dtype, or on another device, and must stay as it is
  /// until wait(). With one rank there is no group, and nothing but the cast.
  void start(const at::Tensor& input, const ProcessGroupPtr* group, BlockPool& pool, const AllGatherFn& all_gather);
  /// The same with parts in place of the gathered buffer, over a group of several ranks that takes them; wait() then
  /// returns an undefined tensor, and the input must stay as it is until wait_for_readers(). The parts, where
  /// parameters are in what a rank sends, are set once; their tensors have memory.
  void start_in_place(const at::Tensor& input, const ProcessGroupPtr& group, BlockPool& pool);
  bool has_segments() const { return parts_ != nullptr; }
  void set_segments(std::vector<TensorSegment> parts);
  /// The ranks' flat shards, one after the other. Valid until release().
  const at::Tensor& wait();
  /// After wait(): returns when peers have read the input of start_in_place() too.
  void wait_for_readers() { pending_.wait_for_readers(); }
  /// As Pending::discard.
  void discard();
  /// The buffers, which end with the result.
  StreamMemory release();
  /// Elements that a rank sends, the tag included.
  int64_t numel() const { return numel_; }
  /// Throws StateError unless all ranks sent the tag of `unit`. After wait().
  void check_tags(int64_t unit, const UnitNames& names) const;
  /// Whether a rank's tag says `fault`, as this one's says `own`: the same on all ranks, and false where none reads
  /// tags. After wait().
  bool is_tagged(ShardFault fault, ShardFault own) const;

 private:
  /// Where the ranks' tags are.
  struct TagPlaces {
    const at::Tensor& in;
    int64_t offset, stride;
  };
  TagPlaces tag_places() const;
  bool reads_tags() const { return tag_places().in.device().is_cpu(); }
  bool tags_are_equal() const;
  std::vector<GatherTag> tags() const;
  at::Tensor as_sent(const at::Tensor& flat_shard, BlockPool& pool);
  void leave_memory();

  int64_t num_ranks_, numel_, tag_offset_;
  PooledBuffer cast_, gathered_buffer_;
  at::Tensor gathered_;
  at::Tensor tags_;  // in place
  TensorSegments parts_;
  Pending pending_;
};

}  // namespace tessera
