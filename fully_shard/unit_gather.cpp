#include "fully_shard/unit_gather.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>

#include "fully_shard/block_copy.h"

namespace tessera {

namespace {

std::optional<GatherFormat> format_of(const UnitGather::Options& options) {
  return GatherFormat::is_needed(options.items) ? std::optional<GatherFormat>({options.layout, options.items})
                                                : std::nullopt;
}

at::TensorOptions compute_options(const UnitGather::Options& options) {
  return at::TensorOptions(options.device).dtype(options.items.at(0).dtype);
}

}  // namespace

UnitGather::UnitGather(Options options)
    : options_(std::move(options)),
      format_(format_of(options_)),
      copies_(gather_copies(options_.layout)),
      gather_(format_ ? ShardGather(options_.layout.num_ranks, format_->bytes(), options_.device)
                      : ShardGather(options_.layout, compute_options(options_))),
      stream_(shared_stream<GatherStream>(options_.device)) {
  if (options_.smaller_ranks > 0) {
    const auto& axes = options_.axes;
    std::vector<at::ScalarType> dtypes;
    for (const auto& item : options_.items) {
      dtypes.push_back(item.dtype);
    }
    smaller_ = std::make_unique<SmallerShare>(smaller_group(axes.mesh, *axes.shard_axis, options_.smaller_ranks),
                                              options_.smaller_layout, dtypes, options_.device);
  }
}

void UnitGather::start(const at::Tensor& flat_shard, const Stamp& stamp, BlockPool& pool,
                       const AllGatherFn& all_gather) {
  const GatherStream::Scope scope(*stream_);
  if (has_share()) {
    share_cut_.wait();
    smaller_->start(pool, all_gather);
  } else {
    start_whole(flat_shard, stamp, pool, all_gather);
  }
  issued_ = StreamMark::here(options_.device);
}

void UnitGather::start_whole(const at::Tensor& flat_shard, const Stamp& stamp, BlockPool& pool,
                             const AllGatherFn& all_gather) {
  const auto* group = options_.layout.num_ranks > 1 ? &options_.axes.shard_group() : nullptr;
  if (!format_ && !flat_shard.is_meta()) {
    gather_.start(flat_shard, group, pool, all_gather);
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto& input = gather_.borrow_input(pool);
  if (flat_shard.is_meta()) {
    input.zero_();
  } else {
    format_->encode(flat_shard, input);
  }
  write_stamp(input, stamp.unit, stamp.fault);
  gather_.start(input, group, pool, all_gather);
}

bool UnitGather::can_use_parts() {
  if (!group_takes_parts_) {
    group_takes_parts_ = !format_ && options_.layout.num_ranks > 1 && options_.layout.is_cut_on_dim_0() &&
                         takes_parts(options_.axes.shard_group(), options_.device.type());
  }
  return *group_takes_parts_;
}

bool UnitGather::can_gather_in_place(const at::Tensor& flat_shard, const AllGatherFn& all_gather) {
  return can_use_parts() && !has_share() && !flat_shard.is_meta() && is_default(all_gather);
}

at::Tensor UnitGather::new_flat_shard(at::ScalarType dtype) {
  const int64_t numel = gather_numel(options_.layout);
  return options_.device.is_cpu() && can_use_parts() ? zeros_to_gather(numel, dtype, options_.axes.shard_group())
                                                     : at::zeros({numel}, at::device(at::kCPU).dtype(dtype));
}

void UnitGather::start_in_place(const at::Tensor& flat_shard, BlockPool& pool,
                                const std::vector<ShardedParam>& params) {
  is_in_place_ = true;
  gather_.start_in_place(flat_shard, options_.axes.shard_group(), pool, options_.layout, params);
}

void UnitGather::wait() {
  issued_.wait();  // a cast without a collective, where there is one rank
  gathered_ = current().wait();
}

void UnitGather::copy_out(const std::vector<ShardedParam>& params) {
  const auto* own = format_ ? &*format_ : nullptr;
  if (const auto* format = has_share() ? smaller_->format() : own) {
    std::vector<at::Tensor> tensors;
    tensors.reserve(params.size());
    for (const auto& param : params) {
      tensors.push_back(param.unsharded());
    }
    format->decode(gathered_, current().numel(), tensors);
    return;
  }
  const auto& copies = has_share() ? smaller_->copies() : copies_;
  BlockCopier copier;
  for (size_t i = 0; i < params.size(); ++i) {
    copier.from_flat(params[i].unsharded(), gathered_, copies[i]);
  }
  copier.run();
}

void UnitGather::give_back() {
  gathered_ = at::Tensor();
  is_in_place_ = false;
  stream_->retire(current().release());
}

void UnitGather::keep_share(const std::vector<ShardedParam>& params, int64_t unit) {
  smaller_->cut(params, unit);
  share_cut_ = StreamMark::here(options_.device);
}

void UnitGather::drop_share() {
  if (smaller_) {
    smaller_->drop();
  }
}

}  // namespace tessera
