#include "fully_shard/param/unit_params.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

#include "fully_shard/layout/stacked_spec.h"
#include "fully_shard/memory/autocast_cache.h"
#include "fully_shard/memory/tensor_memory.h"

namespace tessera {

namespace {

/// Where parameters begin in memory: on a cache line, or as a GPU's matrix products like it best (cuBLAS asks how its
/// operands are aligned, and libtorch's allocator gives no less).
size_t alignment_on(at::Device device) {
  return device.is_cpu() ? 64 : 256;
}

SpecPtr sharded_spec(const NamedParam& param, const DataParallelAxes& axes) {
  const auto placements = axes.placements(param.shard_dim);
  if (param.tp_spec) {
    return stacked_spec(axes.mesh, placements, *param.tp_spec);
  }
  return DTensorSpec::make(axes.mesh, placements,
                           TensorMeta::contiguous(param.tensor.sizes(), param.tensor.scalar_type()));
}

ShardedParam::Options param_options(const NamedParam& param, const UnitParams::Options& options) {
  const auto dtype = param.gather.dtype;
  return {.spec = sharded_spec(param, options.axes),
          .unsharded_spec = param.tp_spec ? param.tp_spec->with_dtype(dtype) : nullptr,
          .compute_dtype = dtype,
          .compute_device = options.device,
          .origin = param.origin,
          .rank = options.axes.shard_rank(),
          .num_ranks = options.layout.num_ranks,
          .dim = param.shard_dim,
          .is_alias = options.is_alias};
}

}  // namespace

UnitParams::UnitParams(const std::vector<NamedParam>& params, const ShardFormat& format, at::Tensor flat_shard,
                       const Options& options)
    : flat_shard_(std::move(flat_shard)), is_alias_(options.is_alias) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const size_t alignment = alignment_on(options.device);
  params_.reserve(params.size());
  memory_offsets_.push_back(0);
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& param = params_.emplace_back(params[i].tensor, options.layout.slots[i], format.chunk(flat_shard_, i),
                                             param_options(params[i], options));
    memory_offsets_.push_back(memory_offsets_.back() +
                              (param.unsharded_size() + alignment - 1) / alignment * alignment);
  }
}

void UnitParams::move_to(const ShardFormat& format, at::Tensor flat_shard) {
  const at::AutoDispatchBelowADInplaceOrView below;
  flat_shard_ = std::move(flat_shard);
  tag_ = {};
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i].move_to(format.chunk(flat_shard_, i));
  }
}

void UnitParams::tag(const GatherTag& tag) {
  if (tag != tag_) {
    tag_ = tag;
    write_tag(flat_shard_, tag_);
  }
}

void UnitParams::take_memory(BlockPool& pool) {
  const auto block = pool.acquire(memory_offsets_.back());
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i].set_unsharded_memory(*block, memory_offsets_[i]);
  }
}

void UnitParams::drop_memory() {
  for (auto& param : params_) {
    param.drop_unsharded_memory();
  }
}

void UnitParams::to_unsharded() {
  forget_autocasts();
  for (auto& param : params_) {
    param.to_unsharded();
  }
}

void UnitParams::to_sharded() {
  forget_autocasts();
  for (auto& param : params_) {
    param.to_sharded();
  }
}

int64_t UnitParams::version() const {
  int64_t sum = 0;
  for (const auto& param : params_) {
    sum += param.version();
  }
  return sum;
}

bool UnitParams::has_trainable() const {
  return std::ranges::any_of(params_, [](const ShardedParam& param) { return param.requires_grad(); });
}

size_t UnitParams::unsharded_bytes() const {
  size_t bytes = 0;
  for (const auto& param : params_) {
    bytes += param.unsharded_bytes();
  }
  return bytes;
}

bool UnitParams::lends_memory_to(const at::Tensor& tensor) const {
  const auto* memory = memory_of(tensor);
  return memory && std::ranges::any_of(
                       params_, [&](const ShardedParam& param) { return memory_of(param.unsharded()) == memory; });
}

}  // namespace tessera
