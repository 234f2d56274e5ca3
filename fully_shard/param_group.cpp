#include "fully_shard/param_group.h"

#include <algorithm>

#include "base/error.h"
#include "fully_shard/autocast_cache.h"

namespace tessera {

void ParamGroup::set_place(int64_t unit, UnitNames names, std::shared_ptr<BlockPool> pool) {
  TESSERA_ASSERT(state_ != UnitState::Gathering, "{} gets a place in a tree while it is gathered", name());
  unit_ = unit;
  names_ = std::move(names);
  pool_ = std::move(pool);
  gather_.wait_until_read();
  write_stamp(flat_shard_, unit_, stamped_);
}

std::string_view ParamGroup::name() const {
  return names_ ? names_->at(static_cast<size_t>(unit_)) : params_.at(0).origin().module;
}

void ParamGroup::report(UnitStep step) const {
  if (report_) {
    report_(step);
  }
}

void ParamGroup::step(UnitStep step) {
  state_ = next_state(state_, step, gather_.has_share());
  report(step);
}

bool ParamGroup::any_replaced() const {
  return std::any_of(params_.begin(), params_.end(), [](const auto& param) { return param.was_replaced(); });
}

GatherFault ParamGroup::fault() const {
  return any_replaced() ? GatherFault::Replaced : is_on_meta() ? GatherFault::OnMeta : GatherFault::None;
}

bool ParamGroup::start_if_sharded() {
  if (state_ != UnitState::Sharded && state_ != UnitState::ShardedSmaller) {
    return false;
  }
  run_step(slots_->unshard, name(), state_, [this] { start_gather(); });
  return true;
}

void ParamGroup::start_gather() {
  gathered_version_ = version();
  if (const auto found = fault(); found != stamped_) {
    stamped_ = found;
    write_stamp(flat_shard_, unit_, stamped_);
  }
  const auto& all_gather = custom_all_gather_ ? custom_all_gather_ : slots_->all_gather;
  if (gather_.can_gather_in_place(flat_shard_, all_gather)) {
    start_gather_in_place();
  } else {
    gather_.start(flat_shard_, {.unit = unit_, .fault = stamped_}, *pool_, all_gather);
  }
  step(UnitStep::Gather);
}

void ParamGroup::start_gather_in_place() {
  take_memory();
  try {
    gather_.start_in_place(flat_shard_, *pool_, params_);
  } catch (...) {
    drop_memory();
    throw;
  }
}

void ParamGroup::drop_memory() {
  for (auto& param : params_) {
    param.drop_unsharded_memory();
  }
}

void ParamGroup::take_memory() {
  const auto block = pool_->borrow(memory_offsets_.back());
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i].set_unsharded_memory(*block, memory_offsets_[i]);
  }
}

void ParamGroup::check_gathered() {
  for (const auto& param : params_) {
    TESSERA_CHECK(
        StateError, !param.was_replaced(),
        "{0}: the data of parameter '{1}' of {2} were replaced after {0} took it (by module.to(), set_data, or a "
        "second unit). Convert or load the module before {0}, or change the values in place",
        options_.api, param.origin().name, param.origin().module);
    TESSERA_CHECK(StateError, !is_on_meta(),
                  "{}: parameter '{}' of {} is still on the meta device, as are the {} parameters of its "
                  "unit. Call to_empty(model), then initialize the parameters (reset_parameters(model)) or load them",
                  options_.api, param.origin().name, param.origin().module, params_.size());
  }
  gather_.check_stamps(unit_, names_);
}

void ParamGroup::finish_unshard() {
  try {
    gather_.wait();
    check_gathered();
    if (!is_alias_ && !gather_.is_in_place()) {
      take_memory();
      gather_.copy_out(params_);
    }
  } catch (...) {
    drop_gather();
    gather_.wait_until_read();
    throw;
  }
  gather_.give_back();
  gather_.drop_share();
  forget_autocasts();
  for (auto& param : params_) {
    param.to_unsharded();
  }
  step(UnitStep::Unshard);
}

void ParamGroup::drop_gather() {
  if (gather_.is_in_place()) {
    drop_memory();
  }
  gather_.give_back();
  step(UnitStep::Drop);
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
  gather_.discard();
  drop_gather();
}

void ParamGroup::reshard() {
  drop_unshard();
  if (state_ == UnitState::Sharded) {
    return;
  }
  run_step(slots_->reshard, name(), state_, [this] { free_params(/*keeps_share=*/false); });
}

void ParamGroup::reshard_after_forward() {
  if (!gather_.can_keep_share() || state_ != UnitState::Unsharded) {
    reshard();
    return;
  }
  run_step(slots_->reshard, name(), state_, [this] { free_params(/*keeps_share=*/true); });
}

void ParamGroup::free_params(bool keeps_share) {
  if (keeps_share) {
    gather_.keep_share(params_, unit_);
  }
  if (state_ == UnitState::Unsharded) {
    forget_autocasts();
    for (auto& param : params_) {
      param.to_sharded();
    }
  }
  if (!keeps_share) {
    gather_.drop_share();
  }
  step(keeps_share ? UnitStep::ReshardSmaller : UnitStep::Reshard);
  gather_.wait_until_read();
}

void ParamGroup::check_none_frozen_since() {
  for (const auto& param : params_) {
    TESSERA_CHECK(
        StateError, param.requires_grad() || !param.awaits_reduction(),
        "{}: parameter '{}' of {} was frozen while its gradient, of a backward with "
        "set_requires_gradient_sync(false), waits for its reduction. Freeze it after a backward that reduces, or "
        "drop those gradients by reset_iter_state()",
        options_.api, param.origin().name, param.origin().module);
  }
  for (size_t part = 0; part < gradients_.size(); ++part) {
    TESSERA_CHECK(StateError, has_trainable(part) || !gradients_.reduction(part).has_partial(),
                  "{}: all parameters of {} were frozen while gradients of theirs, of a backward with "
                  "set_requires_all_reduce(false), wait for their all-reduce. Freeze them after a backward that "
                  "all-reduces, or drop those gradients by reset_iter_state()",
                  options_.api, params_[0].origin().module);
  }
}

bool ParamGroup::has_trainable(size_t part) {
  const auto params = gradients_.params_of(part, params_);
  return std::ranges::any_of(params, [](const ShardedParam& param) { return param.requires_grad(); });
}

// Nothing accumulates into a frozen parameter: its gradient stays, where an optimizer's zero_grad() finds it.
void ParamGroup::begin_backward() {
  for (auto& param : params_) {
    if (param.requires_grad()) {
      param.stash_sharded_grad();
    }
  }
  gradients_.begin(params_);
}

void ParamGroup::restore_gradients() {
  restore_stashed_grads(params_);
}

void ParamGroup::keep_gradients() {
  for (auto& param : params_) {
    param.keep_unsharded_grad(reduce_dtype(param));
  }
  restore_gradients();
  report(UnitStep::KeepGradients);
}

bool ParamGroup::is_reducing() const {
  bool in_flight = false;
  for (size_t part = 0; part < gradients_.size(); ++part) {
    in_flight = in_flight || gradients_.reduction(part).in_flight();
  }
  return in_flight;
}

bool ParamGroup::collect_gradients(size_t part, const GradientSettings& settings) {
  const auto params = gradients_.params_of(part, params_);
  if (!has_trainable(part)) {
    restore_stashed_grads(params);
    return false;
  }
  if (gather_.shards().is_mixed()) {
    check_trained_dtypes();
  }
  gradients_.reduction(part).collect(params, settings);
  return true;
}

void ParamGroup::start_reduction(size_t part) {
  auto& reduction = gradients_.reduction(part);
  reduction.start(gradients_.params_of(part, params_), *pool_);
  report(reduction.is_all_reducing() ? UnitStep::AllReduce : UnitStep::ReduceScatter);
}

void ParamGroup::start_reduction_in(size_t part, const at::Tensor& buffer) {
  gradients_.reduction(part).start_in(buffer);
  report(UnitStep::AllReduce);
}

bool ParamGroup::start_all_reduce(size_t part) {
  auto& reduction = gradients_.reduction(part);
  const bool was_issued = reduction.is_all_reducing();
  const bool in_flight = reduction.start_all_reduce(gradients_.params_of(part, params_));
  if (!was_issued && !is_copying(part)) {
    report(in_flight ? UnitStep::AllReduce : UnitStep::Reduced);
  }
  return in_flight;
}

void ParamGroup::finish_reduction(size_t part) {
  gradients_.reduction(part).finish(gradients_.params_of(part, params_));
  if (!is_copying(part)) {
    report(UnitStep::Reduced);
  }
}

void ParamGroup::give_gradients_back() {
  for (auto& param : params_) {
    param.drop_unsharded_grads();
  }
  restore_gradients();
}

void ParamGroup::abort_backward(bool reshards) {
  try {
    if (reshards) {
      reshard();
    }
  } catch (const CommError&) {
    // The gradients go all the same; whoever uses the group next has the error.
  }
  for (size_t part = 0; part < gradients_.size(); ++part) {
    gradients_.reduction(part).discard();
  }
  gradients_.end();
  give_gradients_back();
}

std::vector<int64_t> ParamGroup::versions() const {
  std::vector<int64_t> versions;
  versions.reserve(params_.size());
  for (const auto& param : params_) {
    versions.push_back(param.version());
  }
  return versions;
}

void ParamGroup::check_versions(const std::vector<int64_t>& versions) const {
  for (size_t i = 0; i < params_.size(); ++i) {
    TESSERA_CHECK(StateError, params_[i].version() == versions[i],
                  "{}: parameter '{}' of {} was changed in place between forward and backward, so its "
                  "gradient would be that of other values. Run backward() before optimizer.step(), or forward again "
                  "after it",
                  options_.api, params_[i].origin().name, params_[i].origin().module);
  }
}

/// What forward writes to a full parameter.
bool ParamGroup::keeps_writes() const {
  return is_alias_ && options_.axes.num_replicas() == 1;
}

void ParamGroup::expect_no_writes() {
  for (auto& param : params_) {
    param.expect_no_writes();
  }
}

void ParamGroup::check_not_written() const {
  if (keeps_writes()) {
    return;
  }
  for (const auto& param : params_) {
    TESSERA_CHECK(StateError, !is_unsharded() || !param.was_written(),
                  "{}: forward changed parameter '{}' of {} in place (as max_norm of an embedding does), which {}. "
                  "Change parameters between iterations, or leave the module out of the unit with ignored_params",
                  options_.api, param.origin().name, param.origin().module,
                  is_alias_ ? "the other ranks' copies would not have" : "its shards would lose");
  }
}

void ParamGroup::check_not_taken(size_t param) const {
  TESSERA_CHECK(StateError, !gradients_.was_taken(param),
                "replicate: parameter '{}' of {} got a second gradient in one backward, from a backward inside of it, "
                "when the first was on its way to the other ranks. Call replicate with bucket_cap_mb = 0",
                params_[param].origin().name, params_[param].origin().module);
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
