#include "fully_shard/gather/post_forward_shard.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>

#include "base/error.h"
#include "comm/context/rank_context.h"
#include "device_mesh/rank_agreement.h"

namespace tessera {

namespace {

using GroupKey = std::tuple<uint64_t, std::vector<int64_t>>;

struct Cache {
  std::mutex mutex;
  std::map<GroupKey, std::weak_ptr<const ProcessGroupPtr>> groups;
};

Cache& cache() {
  static auto* const cache = new Cache;  // ranks that are threads may outlive static destructors
  return *cache;
}

/// That of units that are still there.
std::shared_ptr<const ProcessGroupPtr> find_known(const GroupKey& key) {
  const std::lock_guard lock(cache().mutex);
  std::erase_if(cache().groups, [](const auto& entry) { return entry.second.expired(); });
  const auto found = cache().groups.find(key);
  return found == cache().groups.end() ? nullptr : found->second.lock();
}

}  // namespace

PostForwardShard::PostForwardShard(std::shared_ptr<const ProcessGroupPtr> group, ParamLayout layout,
                                   const std::vector<at::ScalarType>& dtypes, at::Device device)
    : group_(std::move(group)),
      layout_(std::move(layout)),
      options_(at::TensorOptions(device).dtype(dtypes.at(0))),
      format_(GatherFormat::of_dtypes(layout_, dtypes)),
      copies_(gather_copies(layout_)),
      gather_(format_ ? ShardGather(layout_.num_ranks, format_->bytes(), device) : ShardGather(layout_, options_)) {}

/// Where the first `numel` elements of a parameter's chunk go.
at::Tensor PostForwardShard::place(const at::Tensor& share, size_t param, int64_t numel) const {
  return format_ ? format_->item(share, param).narrow(0, 0, numel)
                 : share.narrow(0, layout_.slots[param].offset, numel);
}

void PostForwardShard::cut(const std::vector<ShardedParam>& params, int64_t unit) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const int64_t rank = get_rank(*group_);
  auto share = at::zeros({gather_.numel()}, format_ ? options_.dtype(at::kByte) : options_);
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& slot = layout_.slots[i];
    const auto rows = slot.rows_of(rank, layout_.num_ranks);
    const auto full = params[i].unsharded().view({slot.outer, slot.rows, slot.row_numel});
    place(share, i, slot.numel_of(rank, layout_.num_ranks))
        .view({slot.outer, rows.length, slot.row_numel})
        .copy_(full.narrow(1, rows.offset, rows.length));
  }
  tag_ = {.unit = unit};
  write_tag(share, tag_);
  shard_ = std::move(share);
}

void PostForwardShard::start(const GatherTag& tag, BlockPool& pool, const AllGatherFn& all_gather) {
  if (tag != tag_) {
    tag_ = tag;
    write_tag(shard_, tag_);
  }
  gather_.start(shard_, group_.get(), pool, all_gather);
}

std::shared_ptr<const ProcessGroupPtr> post_forward_group(const DeviceMesh& mesh, int64_t axis, int64_t size) {
  TESSERA_ASSERT(mesh.size(axis) % size == 0, "{} ranks in groups of {}", mesh.size(axis), size);
  const auto ranks = group_ranks(mesh.group(axis));
  const auto first = ranks.begin() + mesh.local_rank(axis) / size * size;
  const std::vector<int64_t> members(first, first + size);
  const GroupKey key{rank_context_id(), members};
  auto known = find_known(key);
  const auto who_knows = all_gather_strings(mesh, known ? "it" : "");  // one may keep a model that another has given up
  if (std::ranges::none_of(who_knows, &std::string::empty)) {
    return known;
  }
  auto group =
      std::make_shared<const ProcessGroupPtr>(new_group(members, fmt::format("reshard_after_forward_{}", size)));
  const std::lock_guard lock(cache().mutex);
  cache().groups.insert_or_assign(key, group);
  return group;
}

}  // namespace tessera
