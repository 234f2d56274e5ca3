#include "fully_shard/param_group.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "base/error.h"
#include "fully_shard/block_copy.h"
#include "fully_shard/stacked_spec.h"

namespace tessera {

namespace {

/// Every parameter begins on a cache line.
constexpr size_t kMemoryAlignment = 64;

std::vector<int64_t> dims_of(const std::vector<NamedParam>& params) {
  std::vector<int64_t> dims;
  for (const auto& param : params) {
    dims.push_back(param.shard_dim);
  }
  return dims;
}

ParamLayout layout_of(const std::vector<NamedParam>& params, int64_t num_ranks) {
  std::vector<std::vector<int64_t>> shapes;
  for (const auto& param : params) {
    shapes.push_back(param.unsharded_sizes().vec());
  }
  return make_param_layout(shapes, num_ranks, dims_of(params));
}

at::TensorOptions compute_options(const NamedParam& param, const MixedPrecisionPolicy& policy) {
  const auto dtype = policy.param_dtype.value_or(param.tensor.scalar_type());
  return at::TensorOptions().dtype(dtype).device(param.tensor.device());
}

SpecPtr sharded_spec(const NamedParam& param, const DataParallelAxes& axes) {
  const auto placements = axes.placements(param.shard_dim);
  if (param.tp_spec) {
    return stacked_spec(axes.mesh, placements, *param.tp_spec);
  }
  return DTensorSpec::make(axes.mesh, placements,
                           TensorMeta::contiguous(param.tensor.sizes(), param.tensor.scalar_type()));
}

}  // namespace

ParamGroup::ParamGroup(const std::vector<NamedParam>& params, Options options)
    : options_(std::move(options)),
      layout_(layout_of(params, options_.axes.num_shards())),
      copies_(gather_copies(layout_)),
      gather_(layout_, compute_options(params.at(0), options_.policy)),
      reduction_({.axes = options_.axes,
                  .reduce_dtype = options_.policy.reduce_dtype.value_or(params[0].tensor.scalar_type()),
                  .grad_dtype = params[0].tensor.scalar_type(),
                  .device = params[0].tensor.device(),
                  .dims = dims_of(params)}),
      pool_(std::make_shared<BlockPool>(params[0].tensor.device())) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto& axes = options_.axes;
  const auto compute = compute_options(params[0], options_.policy);
  const auto compute_dtype = compute.dtype().toScalarType();
  is_alias_ = layout_.num_ranks == 1 && compute.dtype() == params[0].tensor.dtype();
  flat_shard_ = at::zeros({gather_numel(layout_)}, params[0].tensor.options().requires_grad(false));
  params_.reserve(params.size());
  size_t offset = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& param = params[i];
    params_.emplace_back(
        param.tensor, layout_.slots[i], flat_shard_,
        ShardedParam::Options{.spec = sharded_spec(param, axes),
                              .unsharded_spec = param.tp_spec ? param.tp_spec->with_dtype(compute_dtype) : nullptr,
                              .compute_dtype = compute_dtype,
                              .origin = param.origin,
                              .rank = axes.shard_rank(),
                              .num_ranks = layout_.num_ranks,
                              .dim = param.shard_dim,
                              .is_alias = is_alias_});
    memory_offsets_.push_back(offset);
    offset += (params_.back().unsharded_size() + kMemoryAlignment - 1) / kMemoryAlignment * kMemoryAlignment;
  }
  memory_offsets_.push_back(offset);
  if (options_.smaller_ranks > 0) {
    smaller_ = std::make_unique<SmallerShare>(smaller_group(axes.mesh, *axes.shard_axis, options_.smaller_ranks),
                                              layout_of(params, options_.smaller_ranks), compute);
  }
}

void ParamGroup::set_place(int64_t unit, UnitNames names, std::shared_ptr<BlockPool> pool) {
  unit_ = unit;
  names_ = std::move(names);
  pool_ = std::move(pool);
  write_stamp(flat_shard_, unit_, is_faulty_);
}

void ParamGroup::report(UnitStep step) const {
  if (report_) {
    report_(step);
  }
}

void ParamGroup::step(UnitStep step) {
  state_ = next_state(state_, step, smaller_ && smaller_->is_at_hand());
  report(step);
}

bool ParamGroup::any_replaced() const {
  return std::any_of(params_.begin(), params_.end(), [](const auto& param) { return param.was_replaced(); });
}

bool ParamGroup::start_if_sharded() {
  if (state_ != UnitState::Sharded && state_ != UnitState::ShardedSmaller) {
    return false;
  }
  if (const bool is_faulty = any_replaced(); is_faulty != is_faulty_) {
    is_faulty_ = is_faulty;
    write_stamp(flat_shard_, unit_, is_faulty_);
  }
  if (smaller_ && smaller_->is_at_hand()) {
    smaller_->start(*pool_);
  } else {
    gather_.start(flat_shard_, layout_.num_ranks > 1 ? &options_.axes.shard_group() : nullptr, *pool_);
  }
  step(UnitStep::Gather);
  return true;
}

void ParamGroup::take_memory() {
  const auto block = pool_->borrow(memory_offsets_.back());
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i].set_unsharded_memory(*block, memory_offsets_[i]);
  }
}

void ParamGroup::copy_out(const at::Tensor& gathered, const std::vector<std::vector<BlockCopy>>& copies) {
  BlockCopier copier;
  for (size_t i = 0; i < params_.size(); ++i) {
    copier.from_flat(params_[i].unsharded(), gathered, copies[i]);
  }
  copier.run();
}

void ParamGroup::check_gathered(const ShardGather& gather) const {
  for (const auto& param : params_) {
    TESSERA_CHECK(StateError, !param.was_replaced(),
                  "fully_shard: the data of parameter '{}' of {} were replaced after it was sharded (module.to(), "
                  "set_data, or a second unit took it). Convert or load the module before fully_shard, or change the "
                  "values in place",
                  param.origin().name, param.origin().module);
  }
  gather.check_stamps(unit_, names_);
}

void ParamGroup::finish_unshard() {
  const bool from_smaller = smaller_ && smaller_->is_at_hand();
  auto& gather = from_smaller ? smaller_->gather() : gather_;
  try {
    const auto& gathered = gather.wait();
    check_gathered(gather);
    if (!is_alias_) {
      take_memory();
      copy_out(gathered, from_smaller ? smaller_->copies() : copies_);
    }
  } catch (...) {
    gather.give_back();
    step(UnitStep::Drop);
    throw;
  }
  gather.give_back();
  if (from_smaller) {
    smaller_->drop();
  }
  for (auto& param : params_) {
    param.to_unsharded();
  }
  step(UnitStep::Unshard);
}

void ParamGroup::unshard() {
  start_if_sharded();
  if (state_ == UnitState::Gathering) {
    finish_unshard();
  }
}

void ParamGroup::drop_unshard() {
  if (state_ != UnitState::Gathering) {
    return;
  }
  auto& gather = smaller_ && smaller_->is_at_hand() ? smaller_->gather() : gather_;
  gather.wait();
  gather.give_back();
  step(UnitStep::Drop);
}

void ParamGroup::reshard() {
  drop_unshard();
  if (state_ == UnitState::Sharded) {
    return;
  }
  if (state_ == UnitState::Unsharded) {
    for (auto& param : params_) {
      param.to_sharded();
    }
  }
  if (smaller_) {
    smaller_->drop();
  }
  step(UnitStep::Reshard);
}

void ParamGroup::reshard_after_forward() {
  if (!smaller_ || state_ != UnitState::Unsharded) {
    reshard();
    return;
  }
  smaller_->cut(params_, unit_);
  for (auto& param : params_) {
    param.to_sharded();
  }
  step(UnitStep::ReshardSmaller);
}

void ParamGroup::begin_backward() {
  for (auto& param : params_) {
    param.stash_sharded_grad();
  }
}

void ParamGroup::keep_gradients() {
  for (auto& param : params_) {
    param.keep_unsharded_grad(reduction_.reduce_dtype());
    param.restore_stashed_grad();
  }
  report(UnitStep::KeepGradients);
}

bool ParamGroup::has_kept_gradients() const {
  return reduction_.has_partial() ||
         std::any_of(params_.begin(), params_.end(), [](const auto& param) { return param.has_kept_grad(); });
}

void ParamGroup::start_reduction(const GradientSettings& settings) {
  reduction_.start(params_, settings, *pool_);
  report(reduction_.is_all_reducing() ? UnitStep::AllReduce : UnitStep::ReduceScatter);
}

bool ParamGroup::start_all_reduce() {
  const bool was_issued = reduction_.is_all_reducing();
  const bool in_flight = reduction_.start_all_reduce(params_);
  if (!was_issued) {
    report(in_flight ? UnitStep::AllReduce : UnitStep::Reduced);
  }
  return in_flight;
}

void ParamGroup::finish_reduction() {
  reduction_.finish(params_);
  report(UnitStep::Reduced);
}

void ParamGroup::abort_backward() {
  reshard();
  reduction_.discard();
  for (auto& param : params_) {
    param.drop_unsharded_grads();
    param.restore_stashed_grad();
  }
}

std::vector<int64_t> ParamGroup::versions() const {
  std::vector<int64_t> versions;
  versions.reserve(params_.size());
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
