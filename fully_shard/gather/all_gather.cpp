#include "fully_shard/gather/all_gather.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "comm/context/rank_context.h"
#include "device_mesh/rank_agreement.h"

namespace tessera {

namespace {

constexpr const char* kFaults[] = {"", ", whose parameters were replaced after they were sharded",
                                   ", whose parameters are still on the meta device",
                                   ", whose parameters were changed in place between forward and backward",
                                   ", whose parameters may have been changed between forward and backward"};
static_assert(std::size(kFaults) == kShardFaultCount);

std::string unit_name(int64_t unit, const UnitNames& names) {
  const bool known = names && unit < static_cast<int64_t>(names->size());
  return known ? fmt::format("'{}'", (*names)[unit]) : fmt::format("number {}", unit);
}

ParamLayout make_layout(const std::vector<ParamInfo>& params, int64_t num_ranks) {
  std::vector<std::vector<int64_t>> shapes;
  std::vector<int64_t> dims;
  for (const auto& param : params) {
    shapes.push_back(param.unsharded_sizes().vec());
    dims.push_back(param.shard_dim);
  }
  return make_param_layout(shapes, num_ranks, dims);
}

/// Returns one item per parameter.
template <class Item>
std::vector<GatherItem> make_items(const std::vector<ParamInfo>& params, Item item) {
  std::vector<GatherItem> items;
  items.reserve(params.size());
  for (const auto& param : params) {
    items.push_back(item(param));
  }
  return items;
}

/// Returns null for one rank. The mesh of `axes` keeps the group alive.
std::shared_ptr<const ProcessGroupPtr> shard_group(const DataParallelAxes& axes) {
  return axes.num_shards() > 1 ? std::make_shared<const ProcessGroupPtr>(axes.shard_group()) : nullptr;
}

using GroupKey = std::tuple<uint64_t, std::vector<int64_t>>;

struct GroupCache {
  std::mutex mutex;
  std::map<GroupKey, std::weak_ptr<const ProcessGroupPtr>> groups;
};

GroupCache& group_cache() {
  static auto* const cache = new GroupCache;  // ranks that are threads may outlive static destructors
  return *cache;
}

/// Returns the group if units that use it still exist.
std::shared_ptr<const ProcessGroupPtr> find_known(const GroupKey& key) {
  const std::lock_guard lock(group_cache().mutex);
  std::erase_if(group_cache().groups, [](const auto& entry) { return entry.second.expired(); });
  const auto found = group_cache().groups.find(key);
  return found == group_cache().groups.end() ? nullptr : found->second.lock();
}

/// Returns the group of this rank and its neighbors along `axis`: ranks [0, size), [size, 2 size), ... of the axis,
/// whose size is a multiple of `size`. Units of one mesh share it as long as one of them holds it on every rank.
/// Collective over the mesh.
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
  const std::lock_guard lock(group_cache().mutex);
  group_cache().groups.insert_or_assign(key, group);
  return group;
}

}  // namespace

AllGather::Source::Source(FlatLayout flat, std::shared_ptr<const ProcessGroupPtr> among, at::Device device)
    : layout(std::move(flat)),
      group(std::move(among)),
      sent(layout.numel(), at::TensorOptions(device).dtype(layout.dtype())),
      gathered(layout.num_ranks() * layout.numel(), at::TensorOptions(device).dtype(layout.dtype())) {}

/// Abandons buffers to a collective that failed on one peer, which may still receive from another into them, and
/// allocates new ones.
void AllGather::leave_memory() {
  gathered_ = at::Tensor();
  source() = Source(source().layout, source().group, context_->device);
}

// Shards of several dtypes are sent item by item even with one compute dtype, because no single cast fits them all.
AllGather::AllGather(UnitContextPtr context, const std::vector<ParamInfo>& params, int64_t post_forward_ranks)
    : context_(std::move(context)),
      shards_(make_layout(params, context_->axes.num_shards()),
              make_items(params, [](const auto& param) { return GatherItem{.dtype = param.tensor.scalar_type()}; })),
      flat_(FlatLayout(shards_.params(), make_items(params, [](const auto& param) { return param.gather; }),
                       shards_.is_in_bytes()),
            shard_group(context_->axes), context_->device),
      stream_(shared_lane(LaneKind::Gather, context_->device)) {
  if (post_forward_ranks > 0) {
    const auto computed = make_items(params, [](const auto& param) { return GatherItem{.dtype = param.gather.dtype}; });
    post_forward_.emplace(FlatLayout(make_layout(params, post_forward_ranks), computed),
                          post_forward_group(context_->axes.mesh, *context_->axes.shard_axis, post_forward_ranks),
                          context_->device);
  }
}

/// Returns `input` in the dtype and on the device of the unsharded parameters.
const at::Tensor& AllGather::as_sent(const at::Tensor& input, BlockPool& pool) {
  auto& sent = source().sent;
  if (input.dtype() == sent.tensor().dtype() && input.device() == sent.tensor().device()) {
    return input;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto& cast = sent.acquire(pool);
  cast.copy_(input, /*non_blocking=*/true);
  return cast;
}

/// Returns the data to send if the flat shard is not sent unchanged: the encoded items, or only the tag.
const at::Tensor& AllGather::encoded(const at::Tensor& flat_shard, const GatherTag& tag, BlockPool& pool) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto& sent = flat_.sent.acquire(pool);
  if (flat_shard.is_meta()) {
    sent.zero_();
  } else {
    flat_.layout.encode(shards_.chunks(flat_shard.to(sent.device(), /*non_blocking=*/true)), sent);
  }
  write_tag(sent, tag);
  return sent;
}

void AllGather::start(UnitParams& params, const GatherTag& tag, BlockPool& pool, const AllGatherFn& all_gather) {
  const auto& flat_shard = params.flat_shard();
  if (can_use_segments() && !has_post_forward_shard() && !flat_shard.is_meta() && is_default(all_gather)) {
    start_in_place(params, pool);
    return;
  }
  const StreamLane::Scope scope(*stream_);
  auto& from = source();
  at::Tensor sent;
  if (has_post_forward_shard()) {
    post_forward_cut_.wait();
    if (tag != post_forward_tag_) {
      post_forward_tag_ = tag;
      write_tag(post_forward_shard_, tag);
    }
    sent = post_forward_shard_;
  } else {
    const bool is_cast_by_finish = !from.group && flat_shard.device() == context_->device;
    sent = flat_shard.is_meta() || !sends_shards_as_they_are() ? encoded(flat_shard, tag, pool)
           : is_cast_by_finish                                 ? flat_shard
                                                               : as_sent(flat_shard, pool);
  }
  if (from.group) {
    gathered_ = from.gathered.acquire(pool);
    pending_ = all_gather(gathered_, sent, *from.group);
  } else {
    gathered_ = std::move(sent);
  }
  issued_ = StreamEvent::here(context_->device);
}

/// Returns whether all parameters are sharded on dim 0, and sent in one dtype or unchanged.
bool AllGather::can_use_segments() {
  if (!group_supports_segments_) {
    group_supports_segments_ = sends_shards_as_they_are() && flat_.group && shards_.is_cut_on_dim_0() &&
                               supports_segments(*flat_.group, context_->device.type());
  }
  return *group_supports_segments_;
}

at::Tensor AllGather::new_flat_shard(const at::TensorOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const bool is_pageable = options.device().is_cpu() && !options.pinned_memory();
  return is_pageable && context_->device.is_cpu() && can_use_segments()
             ? zeros_to_gather(shards_.numel(), shards_.dtype(), *flat_.group)
             : at::zeros({shards_.numel()}, options.dtype(shards_.dtype()));
}

void AllGather::start_in_place(UnitParams& params, BlockPool& pool) {
  params.take_memory(pool);
  is_in_place_ = true;
  try {
    if (!segments_) {
      const at::AutoDispatchBelowADInplaceOrView below;
      std::vector<TensorSegment> segments;
      for (size_t i = 0; i < params.all().size(); ++i) {
        segments.push_back(shards_.segment(i, params.all()[i].unsharded()));
      }
      tags_ = at::empty({shards_.num_ranks() * kSlotAlignment}, flat_.sent.tensor().options());
      segments.push_back({shards_.numel() - kSlotAlignment, kSlotAlignment, tags_});
      segments_ = std::make_shared<const std::vector<TensorSegment>>(std::move(segments));
    }
    const bool is_cast_on_arrival = params.flat_shard().device() == tags_.device();
    const auto& sent = is_cast_on_arrival ? params.flat_shard() : as_sent(params.flat_shard(), pool);
    pending_ = all_gather_segments_async(segments_, sent, *flat_.group);
  } catch (...) {
    release(params);
    throw;
  }
}

void AllGather::wait() {
  issued_.wait();  // with one rank, for a cast without a collective
  try {
    pending_.wait();
  } catch (...) {
    leave_memory();
    throw;
  }
}

void AllGather::discard() {
  issued_.wait();
  try {
    if (!pending_.discard()) {
      leave_memory();
    }
  } catch (...) {
    leave_memory();
    throw;
  }
}

void AllGather::finish(UnitParams& params, BlockPool& pool) {
  if (!params.is_alias() && !is_in_place_) {
    params.take_memory(pool);
    std::vector<at::Tensor> tensors;
    tensors.reserve(params.all().size());
    for (const auto& param : params.all()) {
      tensors.push_back(param.unsharded());
    }
    source().layout.decode(gathered_, tensors);
  }
  is_in_place_ = false;  // the parameters keep their memory
  release(params);
  drop_post_forward_shard();
}

void AllGather::release(UnitParams& params) {
  if (std::exchange(is_in_place_, false)) {
    params.drop_memory();
  }
  gathered_ = at::Tensor();
  stream_->defer_free({source().gathered.release(), source().sent.release()});
}

void AllGather::keep_post_forward_shard(const std::vector<ShardedParam>& params, int64_t unit) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto& layout = post_forward_->layout;
  const int64_t rank = get_rank(*post_forward_->group), ranks = layout.num_ranks();
  const auto share = at::zeros({layout.numel()}, post_forward_->sent.tensor().options());
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& slot = layout.slot(i);
    const auto rows = slot.rows_on(rank, ranks);
    const auto full = params[i].unsharded().view({slot.outer, slot.rows, slot.row_numel});
    layout.chunk(share, i)
        .narrow(0, 0, slot.numel_on(rank, ranks))
        .view({slot.outer, rows.length, slot.row_numel})
        .copy_(full.narrow(1, rows.offset, rows.length));
  }
  post_forward_tag_ = {.unit = unit};
  write_tag(share, post_forward_tag_);
  post_forward_shard_ = share;
  post_forward_cut_ = StreamEvent::here(context_->device);
}

AllGather::TagPlaces AllGather::tag_places() const {
  const int64_t numel = source().layout.numel();
  return gathered_.defined() ? TagPlaces{gathered_, numel - kSlotAlignment, numel}
                             : TagPlaces{tags_, 0, kSlotAlignment};
}

bool AllGather::tags_are_equal() const {
  const auto [in, offset, stride] = tag_places();
  const size_t item = in.element_size();
  const auto* const tag = static_cast<const char*>(in.const_data_ptr()) + offset * item;
  const int64_t ranks = source().layout.num_ranks();
  bool equal = true;
  for (int64_t rank = 1; rank < ranks; ++rank) {
    equal = equal && std::memcmp(tag, tag + rank * stride * item, kTagNumel * item) == 0;
  }
  return equal;
}

/// Returns one tag per rank.
std::vector<GatherTag> AllGather::tags() const {
  const auto [in, offset, stride] = tag_places();
  const int64_t ranks = source().layout.num_ranks();
  std::vector<GatherTag> tags;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    tags.push_back(read_tag(in.narrow(0, offset + rank * stride, kTagNumel)));
  }
  return tags;
}

bool AllGather::is_tagged(ShardFault fault, ShardFault own) const {
  if (!reads_tags()) {
    return false;
  }
  if (tags_are_equal()) {
    return own == fault;
  }
  return std::ranges::count(tags(), fault, &GatherTag::fault) > 0;
}

void AllGather::check_tags(int64_t unit, const UnitNames& names) const {
  if (!reads_tags() || tags_are_equal()) {
    return;
  }
  std::string who;
  int64_t rank = 0;
  for (const auto& tag : tags()) {
    who += fmt::format("{}rank {}: {}{}", rank == 0 ? "" : ", ", rank, unit_name(tag.unit, names),
                       kFaults[static_cast<size_t>(tag.fault)]);
    ++rank;
  }
  TESSERA_CHECK(StateError, false,
                "fully_shard: the ranks do not gather alike ({}), so every rank stops here; this rank gathers {}. All "
                "ranks run the same modules in the same order, leave the parameters' data and dtype as they are, and "
                "run backward() before optimizer.step()",
                who, unit_name(unit, names));
}

}  // namespace tessera
