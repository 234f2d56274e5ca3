#include "fully_shard/param/unit_params.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

#include "base/error.h"
#include "dtensor/local/tensor_memory.h"

namespace tessera {

namespace {

/// Alignment of parameters in memory: a cache line or, on a GPU, the alignment for fast matrix products (cuBLAS checks
/// the alignment of its operands, and libtorch's allocator gives no less).
size_t alignment_on(at::Device device) {
  return device.is_cpu() ? 64 : 256;
}

}  // namespace

UnitParams::UnitParams(const std::vector<ParamInfo>& params, const FlatLayout& layout, at::Tensor flat_shard,
                       const UnitContext& context, bool is_alias)
    : api_(context.api),
      flat_shard_(std::move(flat_shard)),
      is_alias_(is_alias),
      keeps_writes_(is_alias && context.axes.num_replicas() == 1) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const size_t alignment = alignment_on(context.device);
  params_.reserve(params.size());
  memory_offsets_.push_back(0);
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& param =
        params_.emplace_back(params[i], layout.slot(i), layout.chunk(flat_shard_, i), context, is_alias);
    const size_t bytes = param.unsharded().nbytes();
    memory_offsets_.push_back(memory_offsets_.back() + (bytes + alignment - 1) / alignment * alignment);
  }
}

void UnitParams::move_to(const FlatLayout& layout, at::Tensor flat_shard) {
  const at::AutoDispatchBelowADInplaceOrView below;
  flat_shard_ = std::move(flat_shard);
  tag_ = {};
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i].move_to(layout.chunk(flat_shard_, i));
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

/// Returns a count that increases with each in-place change of a shard.
int64_t UnitParams::version() const {
  int64_t sum = 0;
  for (const auto& param : params_) {
    sum += param.version();
  }
  return sum;
}

size_t UnitParams::unsharded_bytes() const {
  size_t bytes = 0;
  for (const auto& param : params_) {
    bytes += is_alias_ ? 0 : param.unsharded().storage().nbytes();
  }
  return bytes;
}

bool UnitParams::lends_memory_to(const at::Tensor& tensor) const {
  const auto* memory = storage_id(tensor);
  return memory && std::ranges::any_of(
                       params_, [&](const ShardedParam& param) { return storage_id(param.unsharded()) == memory; });
}

ShardFault UnitParams::fault() const {
  const auto is_replaced = [](const ShardedParam& param) { return param.was_replaced(); };
  return std::ranges::any_of(params_, is_replaced) ? ShardFault::Replaced
         : is_on_meta()                            ? ShardFault::OnMeta
                                                   : ShardFault::None;
}

void UnitParams::check_usable() const {
  for (const auto& param : params_) {
    TESSERA_CHECK(
        StateError, !param.was_replaced(),
        "{0}: the data of parameter '{1}' of {2} were replaced after {0} took it (by module.to(), set_data, or a "
        "second unit). Convert or load the module before {0}, or change the values in place",
        api_, param.origin().name, param.origin().module);
    TESSERA_CHECK(StateError, !is_on_meta(),
                  "{}: parameter '{}' of {} is still on the meta device, as are the {} parameters of its "
                  "unit. Call to_empty(model), then initialize the parameters (reset_parameters(model)) or load them",
                  api_, param.origin().name, param.origin().module, params_.size());
  }
}

ParamVersions UnitParams::versions() const {
  ParamVersions versions;
  versions.each.reserve(params_.size());
  for (const auto& param : params_) {
    versions.each.push_back(param.version());
    versions.sum += versions.each.back();
  }
  return versions;
}

void UnitParams::check_unchanged_since(const ParamVersions& versions) const {
  if (!has_changed_since(versions)) {
    return;
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    TESSERA_CHECK(StateError, params_[i].version() == versions.each[i],
                  "{}: parameter '{}' of {} was changed in place between forward and backward, so its "
                  "gradient would be that of other values. Run backward() before optimizer.step(), or forward again "
                  "after it",
                  api_, params_[i].origin().name, params_[i].origin().module);
  }
}

void UnitParams::expect_no_writes() {
  for (auto& param : params_) {
    param.expect_no_writes();
  }
}

void UnitParams::check_not_written() const {
  if (keeps_writes_) {
    return;
  }
  for (const auto& param : params_) {
    TESSERA_CHECK(StateError, !param.was_written(),
                  "{}: forward changed parameter '{}' of {} in place (as max_norm of an embedding does), which {}. "
                  "Change parameters between iterations, or leave the module out of the unit with ignored_params",
                  api_, param.origin().name, param.origin().module,
                  is_alias_ ? "the other ranks' copies would not have" : "its shards would lose");
  }
}

std::string UnitParams::lost_write() const {
  if (is_alias_) {
    return {};
  }
  const auto written = std::ranges::find_if(params_, &ShardedParam::was_written);
  if (written == params_.end()) {
    return {};
  }
  return fmt::format(
      "{}: parameter '{}' of {} was changed in place while its unit was unsharded, which the shards do not have, so "
      "that the change is lost. Change sharded parameters (after fsdp(module).reshard(): the outermost unit stays "
      "unsharded from its forward to the end of its backward), or full ones inside of summon_full_params",
      api_, written->origin().name, written->origin().module);
}

}  // namespace tessera
