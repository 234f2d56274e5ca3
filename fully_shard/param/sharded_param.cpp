#include "fully_shard/param/sharded_param.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/accumulate.h>

#include <algorithm>

#include "base/error.h"
#include "dtensor/local/redistribute.h"
#include "dtensor/local/tensor_memory.h"
#include "fully_shard/layout/stacked_spec.h"

namespace tessera {

namespace {

/// Views of a full parameter may outlive it, in tensors that forward stores elsewhere and in detached copies.
std::string describe_read_after_free(const ParameterOrigin& origin) {
  return fmt::format(
      "the full parameter '{}' was read after its unit, {}, was resharded, which freed its memory: through a view or a "
      "detach()ed copy of it, or by the backward of a tensor that forward kept as a member or wrote to an argument. "
      "clone() what is to be kept, and return from forward what the loss is made of",
      origin.name, origin.module);
}

SpecPtr sharded_spec(const ParamInfo& param, const DataParallelAxes& axes) {
  const auto placements = axes.placements(param.shard_dim);
  if (param.tp_spec) {
    return stacked_spec(axes.mesh, placements, *param.tp_spec);
  }
  return DTensorSpec::make(axes.mesh, placements,
                           TensorMeta::contiguous(param.tensor.sizes(), param.tensor.scalar_type()));
}

}  // namespace

ShardedParam::ShardedParam(const ParamInfo& param, const ParamSlot& slot, const at::Tensor& chunk,
                           const UnitContext& context, bool is_alias)
    : param_(param.tensor),
      slot_(slot),
      grad_origin_(
          std::make_shared<ParameterOrigin>(ParameterOrigin{param.origin->name + ".grad", param.origin->module})),
      unsharded_spec_(param.tp_spec ? param.tp_spec->with_dtype(param.gather.dtype) : nullptr),
      is_alias_(is_alias) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto full = unsharded_spec_ ? dtensor_meta(param_)->local : param_.detach();
  if (!is_alias_) {
    const auto compute = at::TensorOptions(context.device).dtype(param.gather.dtype);
    unsharded_ = tensor_without_memory(full.sizes(), compute);
    reads_ = ReadGuard(unsharded_, describe_read_after_free(*param.origin));
    in_use_ = unsharded_spec_ ? wrap_local(unsharded_, unsharded_spec_) : unsharded_;
  }
  const auto own = slot_.rows_on(context.axes.shard_rank(), context.axes.num_shards());
  const auto rows = full.narrow(param.shard_dim, own.offset, own.length);
  sharded_ = wrap_local(rows, sharded_spec(param, context.axes), param.origin);
  move_to(chunk);
  if (!full.is_meta()) {
    shard().copy_(rows);
  }
}

void ShardedParam::move_to(const at::Tensor& chunk) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto sizes = spec()->local_sizes();
  const auto local = chunk.narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
  sharded_ = wrap_local(local, spec(), dtensor_meta(sharded_)->origin);
  if (is_alias_) {
    unsharded_ = local;
    in_use_ = unsharded_spec_ ? wrap_local(unsharded_, unsharded_spec_) : unsharded_;
  }
  replace_data(param_, sharded_);
}

void ShardedParam::set_unsharded_memory(PoolBlock& block, size_t offset) {
  reads_.allow_reads();
  set_memory(unsharded_, block, offset, unsharded_.nbytes());
}

void ShardedParam::drop_unsharded_memory() {
  if (!is_alias_) {
    clear_memory(unsharded_);
    reads_.forbid_reads();
  }
}

void ShardedParam::to_unsharded() {
  replace_data(param_, in_use_);
}

void ShardedParam::to_sharded() {
  const auto memory = [](const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  };
  if (dtensor_meta(param_) == dtensor_meta(in_use_) && memory(param_) == memory(in_use_)) {
    replace_data(param_, sharded_);
  }
  drop_unsharded_memory();
}

/// Uses the impl, because Tensor::grad() also decides whether to warn, which takes 1 us for a unit of 12 parameters.
bool ShardedParam::has_sharded_grad() const {
  const auto* meta = dtensor_meta(param_.unsafeGetTensorImpl()->grad());
  return meta && (!unsharded_spec_ || meta->spec->mesh() != unsharded_spec_->mesh());
}

void ShardedParam::place_sharded_grad() {
  auto& grad = param_.mutable_grad();
  const auto* meta = dtensor_meta(grad);
  if (meta->spec->placements() == spec()->placements()) {
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  grad = wrap_local(redistribute_local(meta->local, *meta->spec, spec()->placements()), spec(), grad_origin_);
}

void ShardedParam::stash_sharded_grad() {
  if (has_sharded_grad()) {
    auto& grad = param_.mutable_grad();
    stashed_grad_ = std::move(grad);
    grad = at::Tensor();
  }
}

void ShardedParam::restore_stashed_grad() {
  if (stashed_grad_.defined()) {
    param_.mutable_grad() = std::move(stashed_grad_);
    stashed_grad_ = at::Tensor();
  }
}

void ShardedParam::set_sharded_grad(at::Tensor grad) {
  param_.mutable_grad() = std::move(grad);
  stashed_grad_ = at::Tensor();
}

at::Tensor ShardedParam::take_accumulated() {
  at::Tensor taken;
  if (!has_sharded_grad()) {
    auto& grad = param_.mutable_grad();
    taken = std::move(grad);
    grad = at::Tensor();
  }
  return taken;
}

/// Returns autograd's gradient as a dense tensor: other ranks may have one of another or no layout, and all send the
/// same.
at::Tensor ShardedParam::take_all_accumulated() {
  auto taken = take_accumulated();
  if (taken.defined() && taken.layout() != c10::kStrided) {
    const at::AutoDispatchBelowADInplaceOrView below;
    taken = taken.to_dense();
  }
  if (!kept_grad_.defined()) {
    return taken;
  }
  auto kept = std::move(kept_grad_);
  kept_grad_ = at::Tensor();
  if (taken.defined()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    kept.add_(taken);
  }
  return kept;
}

at::Tensor ShardedParam::take_unsharded_grad(at::ScalarType dtype) {
  awaits_reduction_ = false;
  auto grad = take_all_accumulated();
  if (!unsharded_spec_ || !grad.defined()) {
    return grad;
  }
  const auto* meta = dtensor_meta(grad);
  TESSERA_ASSERT(meta != nullptr, "a plain gradient of '{}', which is {}", origin().name, unsharded_spec_->to_string());
  const auto& to = unsharded_spec_->placements();
  if (meta->spec->placements() == to) {
    return meta->local;
  }
  const auto from = meta->spec->with_dtype(meta->spec->has_partial() ? dtype : grad.scalar_type());
  return redistribute_local(meta->local.to(from->dtype()), *from, to);
}

void ShardedParam::keep_unsharded_grad(at::ScalarType dtype) {
  awaits_reduction_ = awaits_reduction_ || requires_grad();
  auto kept = take_all_accumulated();
  if (kept.defined()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    kept_grad_ = kept.to(dtype);
  }
}

void ShardedParam::drop_unsharded_grads() {
  take_accumulated();
  kept_grad_ = at::Tensor();
  awaits_reduction_ = false;
}

bool has_trainable(std::span<const ShardedParam> params) {
  return std::ranges::any_of(params, &ShardedParam::requires_grad);
}

void restore_stashed_grads(std::span<ShardedParam> params) {
  for (auto& param : params) {
    param.restore_stashed_grad();
  }
}

}  // namespace tessera
