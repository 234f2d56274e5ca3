#include "fully_shard/sharded_param.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>

#include "base/error.h"

namespace tessera {

namespace {

std::vector<int64_t> with_rows(const at::Tensor& tensor, int64_t rows) {
  auto sizes = tensor.sizes().vec();
  sizes[0] = rows;
  return sizes;
}

void free_storage(const at::Tensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, tensor.device()));
  storage->set_nbytes(0);
}

}  // namespace

ShardedParam::ShardedParam(at::Tensor param, const ParamSlot& slot, const at::Tensor& flat_shard, Options options)
    : param_(std::move(param)), slot_(slot), origin_(std::move(options.origin)) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto full = param_.detach();
  const int64_t num_ranks = options.mesh.size();
  const auto own = slot_.rows_of(options.mesh.local_rank(), num_ranks);

  spec_ = DTensorSpec::make(options.mesh, {Shard(0)}, TensorMeta::contiguous(full.sizes(), full.scalar_type()));
  const auto local = flat_shard.narrow(0, slot_.offset, own.length * slot_.row_numel).view(with_rows(full, own.length));
  local.copy_(full.narrow(0, own.offset, own.length));
  sharded_ = wrap_local(local, spec_, origin_);
  grad_origin_ = std::make_shared<ParameterOrigin>(ParameterOrigin{origin_->name + ".grad", origin_->module});

  unsharded_ = at::empty(full.sizes(), full.options().dtype(options.compute_dtype));
  unsharded_flat_ = unsharded_.view({-1});
  free_storage(unsharded_);

  const auto grad = param_.grad();
  TESSERA_CHECK(StateError, !grad.defined(),
                "fully_shard: parameter '{}' has a gradient already, which sharding would lose; call zero_grad() "
                "before fully_shard",
                origin_->name);
  param_.set_data(sharded_);
}

void ShardedParam::check_not_replaced() const {
  TESSERA_CHECK(StateError, dtensor_meta(param_) == dtensor_meta(sharded_),
                "fully_shard: the data of parameter '{}' of {} were replaced after it was sharded (module.to(), "
                "set_data, or a second unit took it). Convert or load the module before fully_shard, or change the "
                "values in place",
                origin_->name, origin_->module);
}

void ShardedParam::allocate_unsharded() {
  auto* storage = unsharded_.storage().unsafeGetStorageImpl();
  const size_t bytes = static_cast<size_t>(slot_.numel()) * unsharded_.element_size();
  storage->set_data_ptr_noswap(c10::GetAllocator(unsharded_.device().type())->allocate(bytes));
  storage->set_nbytes(bytes);
}

void ShardedParam::to_unsharded() {
  param_.set_data(unsharded_);
}

void ShardedParam::to_sharded() {
  param_.set_data(sharded_);
  free_storage(unsharded_);
}

void ShardedParam::stash_sharded_grad() {
  auto& grad = param_.mutable_grad();
  if (grad.defined() && dtensor_meta(grad)) {
    sharded_grad_ = std::move(grad);
    grad = at::Tensor();
  }
}

at::Tensor ShardedParam::take_unsharded_grad() {
  auto& grad = param_.mutable_grad();
  at::Tensor taken;
  if (grad.defined() && !dtensor_meta(grad)) {
    taken = std::move(grad);
    grad = at::Tensor();
  }
  return taken;
}

void ShardedParam::set_sharded_grad(const at::Tensor& reduced) {
  const at::AutoDispatchBelowADInplaceOrView below;
  auto grad = std::move(sharded_grad_);
  sharded_grad_ = at::Tensor();
  if (reduced.defined()) {
    const auto local = reduced.view(spec_->local_sizes());
    if (grad.defined()) {
      dtensor_meta(grad)->local.add_(local);
    } else {
      grad = wrap_local(local, spec_, grad_origin_);
    }
  }
  if (grad.defined()) {
    param_.mutable_grad() = std::move(grad);
  }
}

int64_t ShardedParam::version() const {
  return static_cast<int64_t>(dtensor_meta(sharded_)->local._version());
}

size_t ShardedParam::unsharded_bytes() const {
  return unsharded_.storage().nbytes();
}

}  // namespace tessera
