#include "fully_shard/param/sharded_param.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include "base/error.h"
#include "dtensor/local/redistribute.h"
#include "fully_shard/memory/replace_data.h"

namespace tessera {

namespace {

/// Views of a full parameter outlive it in what forward keeps beside its outputs, and in detached copies.
std::string describe_read_after_free(const ParameterOrigin& origin) {
  return fmt::format(
      "the full parameter '{}' was read after its unit, {}, was resharded, which freed its memory: through a view or a "
      "detach()ed copy of it, or by the backward of a tensor that forward kept as a member or wrote to an argument. "
      "clone() what is to be kept, and return from forward what the loss is made of",
      origin.name, origin.module);
}

}  // namespace

ShardedParam::ShardedParam(at::Tensor param, const ParamSlot& slot, const at::Tensor& chunk, Options options)
    : param_(std::move(param)),
      slot_(slot),
      origin_(std::move(options.origin)),
      spec_(std::move(options.spec)),
      unsharded_spec_(std::move(options.unsharded_spec)),
      own_numel_(slot_.numel_of(options.rank, options.num_ranks)),
      is_alias_(options.is_alias) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto full = unsharded_spec_ ? dtensor_meta(param_)->local : param_.detach();
  const auto own = slot_.rows_of(options.rank, options.num_ranks);
  grad_origin_ = std::make_shared<ParameterOrigin>(ParameterOrigin{origin_->name + ".grad", origin_->module});
  if (!is_alias_) {
    const auto compute = at::TensorOptions(options.compute_device).dtype(options.compute_dtype);
    unsharded_ = tensor_without_memory(full.sizes(), compute);
    reads_ = ReadGuard(unsharded_, describe_read_after_free(*origin_));
    in_use_ = unsharded_spec_ ? wrap_local(unsharded_, unsharded_spec_) : unsharded_;
  }
  const auto local = place_in(chunk);
  if (!full.is_meta()) {
    local.copy_(full.narrow(options.dim, own.offset, own.length));
  }
  replace_data(param_, sharded_);
}

/// Returns the shard's local tensor there.
at::Tensor ShardedParam::place_in(const at::Tensor& chunk) {
  auto local = chunk.narrow(0, 0, own_numel_).view(spec_->local_sizes());
  sharded_ = wrap_local(local, spec_, origin_);
  if (is_alias_) {
    unsharded_ = local;
    in_use_ = unsharded_spec_ ? wrap_local(unsharded_, unsharded_spec_) : unsharded_;
  }
  return local;
}

void ShardedParam::move_to(const at::Tensor& chunk) {
  const at::AutoDispatchBelowADInplaceOrView below;
  place_in(chunk);
  replace_data(param_, sharded_);
}

void ShardedParam::to_unsharded() {
  replace_data(param_, in_use_);
}

/// Whether the parameter still is what to_unsharded() made it.
bool ShardedParam::is_in_use() const {
  const auto memory = [](const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  };
  return dtensor_meta(param_) == dtensor_meta(in_use_) && memory(param_) == memory(in_use_);
}

void ShardedParam::to_sharded() {
  if (is_in_use()) {
    replace_data(param_, sharded_);
  }
  drop_unsharded_memory();
}

/// Asks the impl: Tensor::grad() also finds out whether to warn, which takes 1 us for a unit of 12 parameters.
bool ShardedParam::has_sharded_grad() const {
  const auto* meta = dtensor_meta(param_.unsafeGetTensorImpl()->grad());
  return meta && (!unsharded_spec_ || meta->spec->mesh() != unsharded_spec_->mesh());
}

bool ShardedParam::has_foreign_grad() const {
  const auto* meta = dtensor_meta(param_.unsafeGetTensorImpl()->grad());
  return has_sharded_grad() && meta->spec->mesh() != spec_->mesh();
}

void ShardedParam::place_sharded_grad() {
  auto& grad = param_.mutable_grad();
  const auto* meta = dtensor_meta(grad);
  if (meta->spec->placements() == spec_->placements()) {
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  grad = wrap_local(redistribute_local(meta->local, *meta->spec, spec_->placements()), spec_, grad_origin_);
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

/// As autograd left it, but dense: other ranks may have a gradient of no or another layout, and all send alike.
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
  TESSERA_ASSERT(meta != nullptr, "a plain gradient of '{}', which is {}", origin_->name, unsharded_spec_->to_string());
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

void restore_stashed_grads(std::span<ShardedParam> params) {
  for (auto& param : params) {
    param.restore_stashed_grad();
  }
}

}  // namespace tessera
