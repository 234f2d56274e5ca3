#include "fully_shard/sharded_param.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>

#include "base/error.h"

namespace tessera {

ShardedParam::ShardedParam(at::Tensor param, const ParamSlot& slot, const at::Tensor& flat_shard, Options options)
    : param_(std::move(param)),
      slot_(slot),
      origin_(std::move(options.origin)),
      spec_(std::move(options.spec)),
      is_alias_(options.is_alias) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto full = param_.detach();
  const auto own = slot_.rows_of(options.rank, options.num_ranks);
  const int64_t own_numel = slot_.numel_of(options.rank, options.num_ranks);
  const auto local = flat_shard.narrow(0, slot_.offset, own_numel).view(spec_->local_sizes());
  local.copy_(full.narrow(options.dim, own.offset, own.length));
  sharded_ = wrap_local(local, spec_, origin_);
  grad_origin_ = std::make_shared<ParameterOrigin>(ParameterOrigin{origin_->name + ".grad", origin_->module});
  unsharded_ = is_alias_ ? local : tensor_without_memory(full.sizes(), full.options().dtype(options.compute_dtype));
  param_.set_data(sharded_);
}

/// param_.set_data(data) without its check of the types, which goes through the dispatcher and the DTensor fallback and
/// costs seven times the rest. As there, a type that changes gets a new node to accumulate its gradient.
void ShardedParam::take_on(const at::Tensor& data) {
  if (auto* meta = torch::autograd::impl::get_autograd_meta(param_)) {
    const std::lock_guard lock(meta->mutex_);
    meta->grad_accumulator_.reset();
  }
  param_.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

void ShardedParam::to_sharded() {
  take_on(sharded_);
  if (!is_alias_) {
    clear_memory(unsharded_);
  }
}

void ShardedParam::stash_sharded_grad() {
  auto& grad = param_.mutable_grad();
  if (grad.defined() && dtensor_meta(grad)) {
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
  auto& grad = param_.mutable_grad();
  at::Tensor taken;
  if (grad.defined() && !dtensor_meta(grad)) {
    taken = std::move(grad);
    grad = at::Tensor();
  }
  return taken;
}

at::Tensor ShardedParam::take_unsharded_grad() {
  auto taken = take_accumulated();
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

void ShardedParam::keep_unsharded_grad(at::ScalarType dtype) {
  auto kept = take_unsharded_grad();
  if (kept.defined()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    kept_grad_ = kept.to(dtype);
  }
}

void ShardedParam::drop_unsharded_grads() {
  take_accumulated();
  kept_grad_ = at::Tensor();
}

}  // namespace tessera
