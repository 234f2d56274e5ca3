#include "fully_shard/param_group.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "base/error.h"
#include "fully_shard/all_gather.h"
#include "fully_shard/gradient_reduction.h"

namespace tessera {

namespace {

ParamLayout layout_of(const std::vector<NamedParam>& params, int64_t num_ranks) {
  std::vector<std::vector<int64_t>> shapes;
  for (const auto& param : params) {
    shapes.push_back(param.tensor.sizes().vec());
  }
  return make_param_layout(shapes, num_ranks);
}

}  // namespace

ParamGroup::ParamGroup(const std::vector<NamedParam>& params, const DeviceMesh& mesh,
                       const MixedPrecisionPolicy& policy)
    : mesh_(mesh), layout_(layout_of(params, mesh.size())) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto dtype = params.at(0).tensor.scalar_type();
  compute_dtype_ = policy.param_dtype.value_or(dtype);
  reduce_dtype_ = policy.reduce_dtype.value_or(dtype);
  flat_shard_ = at::zeros({layout_.shard_numel}, params[0].tensor.options().requires_grad(false));
  params_.reserve(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    params_.emplace_back(
        params[i].tensor, layout_.slots[i], flat_shard_,
        ShardedParam::Options{.mesh = mesh_, .compute_dtype = compute_dtype_, .origin = params[i].origin});
  }
}

void ParamGroup::unshard() {
  if (unsharded_) {
    return;
  }
  for (auto& param : params_) {
    param.check_not_replaced();
    param.allocate_unsharded();
  }
  all_gather_params(params_, layout_, flat_shard_, compute_dtype_, mesh_.group());
  for (auto& param : params_) {
    param.to_unsharded();
  }
  unsharded_ = true;
}

void ParamGroup::reshard() {
  if (!unsharded_) {
    return;
  }
  for (auto& param : params_) {
    param.to_sharded();
  }
  unsharded_ = false;
}

void ParamGroup::begin_backward() {
  for (auto& param : params_) {
    param.stash_sharded_grad();
  }
}

void ParamGroup::reduce_gradients() {
  TESSERA_ASSERT(!unsharded_, "gradients of {} are reduced while unsharded", params_[0].origin().module);
  if (!has_trainable()) {
    return;
  }
  std::vector<at::Tensor> grads;
  for (auto& param : params_) {
    grads.push_back(param.take_unsharded_grad());
  }
  const auto reduced = reduce_scatter_grads(std::move(grads), layout_,
                                            {.device = flat_shard_.device(),
                                             .reduce_dtype = reduce_dtype_,
                                             .grad_dtype = flat_shard_.scalar_type(),
                                             .rank = mesh_.local_rank()},
                                            mesh_.group());
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i].set_sharded_grad(reduced[i]);
  }
}

void ParamGroup::abort_backward() {
  reshard();
  for (auto& param : params_) {
    param.take_unsharded_grad();
    param.set_sharded_grad({});
  }
}

std::vector<int64_t> ParamGroup::versions() const {
  std::vector<int64_t> versions;
  for (const auto& param : params_) {
    versions.push_back(param.version());
  }
  return versions;
}

bool ParamGroup::has_trainable() const {
  return std::any_of(params_.begin(), params_.end(), [](const ShardedParam& param) { return param.requires_grad(); });
}

size_t ParamGroup::unsharded_bytes() const {
  size_t bytes = 0;
  for (const auto& param : params_) {
    bytes += param.unsharded_bytes();
  }
  return bytes;
}

}  // namespace tessera
