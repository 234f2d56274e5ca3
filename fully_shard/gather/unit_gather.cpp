#include "fully_shard/gather/unit_gather.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "fully_shard/layout/block_copy.h"

namespace tessera {

namespace {

/// Shards of several dtypes are sent item by item even where one dtype is computed with: no one cast fits them all.
std::optional<GatherFormat> format_of(const UnitGather::Options& options, const ShardFormat& shards) {
  return shards.is_mixed() || GatherFormat::is_needed(options.items)
             ? std::optional<GatherFormat>({options.layout, options.items})
             : std::nullopt;
}

at::TensorOptions compute_options(const UnitGather::Options& options) {
  return at::TensorOptions(options.device).dtype(options.items.at(0).dtype);
}

}  // namespace

UnitGather::UnitGather(Options options)
    : options_(std::move(options)),
      shards_(options_.layout, options_.shard_dtypes),
      format_(format_of(options_, shards_)),
      copies_(gather_copies(options_.layout)),
      gather_(format_ ? ShardGather(options_.layout.num_ranks, format_->bytes(), options_.device)
                      : ShardGather(options_.layout, compute_options(options_))),
      stream_(shared_stream<GatherStream>(options_.device)) {
  if (options_.post_forward_ranks > 0) {
    const auto& axes = options_.axes;
    std::vector<at::ScalarType> dtypes;
    for (const auto& item : options_.items) {
      dtypes.push_back(item.dtype);
    }
    post_forward_ =
        std::make_unique<PostForwardShard>(post_forward_group(axes.mesh, *axes.shard_axis, options_.post_forward_ranks),
                                           options_.post_forward_layout, dtypes, options_.device);
  }
}

void UnitGather::start(const at::Tensor& flat_shard, const GatherTag& tag, BlockPool& pool,
                       const AllGatherFn& all_gather) {
  const GatherStream::Scope scope(*stream_);
  if (keeps_post_forward_shard()) {
    share_cut_.wait();
    post_forward_->start(tag, pool, all_gather);
  } else {
    start_whole(flat_shard, tag, pool, all_gather);
  }
  issued_ = StreamEvent::here(options_.device);
}

void UnitGather::start_whole(const at::Tensor& flat_shard, const GatherTag& tag, BlockPool& pool,
                             const AllGatherFn& all_gather) {
  const auto* group = options_.layout.num_ranks > 1 ? &options_.axes.shard_group() : nullptr;
  if (is_sent_as_it_is() && !flat_shard.is_meta()) {
    gather_.start(flat_shard, group, pool, all_gather);
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto& input = gather_.acquire_input(pool);
  if (flat_shard.is_meta()) {
    input.zero_();
  } else {
    format_->encode(shards_.chunks(flat_shard.to(input.device(), /*non_blocking=*/true)), input);
  }
  write_tag(input, tag);
  gather_.start(input, group, pool, all_gather);
}

/// The flat shard itself, or with one cast of all of it.
bool UnitGather::is_sent_as_it_is() const {
  if (!format_) {
    return true;
  }
  const auto is_same = [](const GatherItem& item, at::ScalarType dtype) {
    return !item.extension && item.dtype == dtype;
  };
  return std::ranges::equal(options_.items, options_.shard_dtypes, is_same);
}

bool UnitGather::can_use_segments() {
  if (!group_supports_segments_) {
    group_supports_segments_ = is_sent_as_it_is() && options_.layout.num_ranks > 1 &&
                               options_.layout.is_cut_on_dim_0() &&
                               supports_segments(options_.axes.shard_group(), options_.device.type());
  }
  return *group_supports_segments_;
}

bool UnitGather::can_gather_in_place(const at::Tensor& flat_shard, const AllGatherFn& all_gather) {
  return can_use_segments() && !keeps_post_forward_shard() && !flat_shard.is_meta() && is_default(all_gather);
}

at::Tensor UnitGather::new_flat_shard(const at::TensorOptions& options) {
  const bool is_pageable = options.device().is_cpu() && !options.pinned_memory();
  return is_pageable && options_.device.is_cpu() && can_use_segments()
             ? zeros_to_gather(shards_.numel(), shards_.dtype(), options_.axes.shard_group())
             : at::zeros({shards_.numel()}, options.dtype(shards_.dtype()));
}

void UnitGather::start_in_place(const at::Tensor& flat_shard, BlockPool& pool,
                                const std::vector<ShardedParam>& params) {
  if (!gather_.has_segments()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    std::vector<TensorSegment> parts;
    for (size_t i = 0; i < params.size(); ++i) {
      parts.push_back(shards_.part(i, params[i].unsharded()));
    }
    gather_.set_segments(std::move(parts));
  }
  gather_.start_in_place(flat_shard, options_.axes.shard_group(), pool);
  is_in_place_ = true;
}

void UnitGather::wait() {
  issued_.wait();  // a cast without a collective, where there is one rank
  gathered_ = current().wait();
}

void UnitGather::discard() {
  issued_.wait();
  current().discard();
}

void UnitGather::copy_out(const std::vector<ShardedParam>& params) {
  const auto* own = format_ ? &*format_ : nullptr;
  if (const auto* format = keeps_post_forward_shard() ? post_forward_->format() : own) {
    std::vector<at::Tensor> tensors;
    tensors.reserve(params.size());
    for (const auto& param : params) {
      tensors.push_back(param.unsharded());
    }
    format->decode(gathered_, current().numel(), tensors);
    return;
  }
  const auto& copies = keeps_post_forward_shard() ? post_forward_->copies() : copies_;
  BlockCopier copier;
  for (size_t i = 0; i < params.size(); ++i) {
    copier.from_flat(params[i].unsharded(), gathered_, copies[i]);
  }
  copier.run();
}

void UnitGather::release() {
  gathered_ = at::Tensor();
  is_in_place_ = false;
  stream_->defer_free(current().release());
}

void UnitGather::keep_post_forward_shard(const std::vector<ShardedParam>& params, int64_t unit) {
  post_forward_->cut(params, unit);
  share_cut_ = StreamEvent::here(options_.device);
}

void UnitGather::drop_post_forward_shard() {
  if (post_forward_) {
    post_forward_->drop();
  }
}

}  // namespace tessera
