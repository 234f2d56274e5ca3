#pragma once
// reshard_after_forward = int: between forward and backward each rank keeps a share of the unit's full parameters, cut
// among a few neighbours, so that the gather for backward stays among them. With 8 ranks and 2 neighbours a rank keeps
// half of the parameters in place of an eighth, and backward's all-gather runs over pairs. The share is of the
// parameters as forward computed with them: each in its compute dtype, whatever was sent for forward. So it is for that
// forward's backward alone: a gather outside of a backward drops it, since a step may have come between.

#include <memory>
#include <optional>
#include <vector>

#include "fully_shard/gather/all_gather.h"
#include "fully_shard/layout/gather_format.h"
#include "fully_shard/param/sharded_param.h"

namespace tessera {

class PostForwardShard {
 public:
  /// `layout`: of the unit's parameters, which compute on `device` in `dtypes`, among the ranks of `group`.
  PostForwardShard(std::shared_ptr<const ProcessGroupPtr> group, ParamLayout layout,
                   const std::vector<at::ScalarType>& dtypes, at::Device device);

  bool is_at_hand() const { return shard_.defined(); }
  /// Cuts this rank's share from the full parameters.
  void cut(const std::vector<ShardedParam>& params, int64_t unit);
  void drop() { shard_ = at::Tensor(); }

  /// Issues the all-gather of the shares; only while one is at hand.
  void start(const GatherTag& tag, BlockPool& pool, const AllGatherFn& all_gather);
  ShardGather& gather() { return gather_; }
  /// How the share is laid out where dtypes differ; else null, and by copies().
  const GatherFormat* format() const { return format_ ? &*format_ : nullptr; }
  const std::vector<std::vector<BlockCopy>>& copies() const { return copies_; }

 private:
  at::Tensor place(const at::Tensor& share, size_t param, int64_t numel) const;

  std::shared_ptr<const ProcessGroupPtr> group_;
  ParamLayout layout_;
  at::TensorOptions options_;
  std::optional<GatherFormat> format_;
  std::vector<std::vector<BlockCopy>> copies_;
  ShardGather gather_;
  at::Tensor shard_;
  GatherTag tag_;  // of the share
};

/// The group of this rank and its neighbours along `axis`: ranks [0, size), [size, 2 size), ... of the axis, whose size
/// is a multiple of `size`. Units of one mesh share it while one of them holds it on every rank. Collective over the
/// mesh.
std::shared_ptr<const ProcessGroupPtr> post_forward_group(const DeviceMesh& mesh, int64_t axis, int64_t size);

}  // namespace tessera
