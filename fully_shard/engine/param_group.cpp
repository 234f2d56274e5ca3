#include "fully_shard/engine/param_group.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>

#include "base/error.h"
#include "comm/context/flight_record.h"
#include "fully_shard/memory/memory_label.h"

namespace tessera {

namespace {

/// Parameters on the meta device, and offloaded ones on the CPU, will compute on the thread's current device.
at::Device compute_device(const at::Tensor& param, const DeviceMesh& mesh) {
  if (param.device().type() == mesh.device_type() || mesh.device_type() == at::kCPU) {
    return mesh.device_type() == at::kCPU ? at::Device(at::kCPU) : param.device();
  }
  return c10::impl::getDeviceGuardImpl(mesh.device_type())->getDevice();
}

/// Returns whether one rank has all rows, on the compute device and in the compute dtype.
bool is_alias(const std::vector<ParamInfo>& params, const ParamGroup::Options& options, at::Device compute_device) {
  return options.axes.num_shards() == 1 && (!options.offload || compute_device.is_cpu()) &&
         std::ranges::all_of(params, [](const auto& param) {
           return param.gather.dtype == param.tensor.scalar_type() && !param.gather.extension;
         });
}

/// Returns the options of shards and their gradients: in page-locked memory, if the user requests it.
at::TensorOptions shard_options(const ParamGroup::Options& options, at::Device compute_device) {
  const bool is_pinned = options.offload && options.offload->pin_memory && compute_device.is_cuda();
  return at::TensorOptions(options.offload ? at::Device(at::kCPU) : compute_device).pinned_memory(is_pinned);
}

UnitContextPtr make_context(const std::vector<ParamInfo>& params, const ParamGroup::Options& options) {
  const auto device = compute_device(params.at(0).tensor, options.axes.mesh);
  return std::make_shared<const UnitContext>(UnitContext{.api = options.api,
                                                         .axes = options.axes,
                                                         .device = device,
                                                         .shard_options = shard_options(options, device),
                                                         .reduce_dtype = options.policy.reduce_dtype});
}

}  // namespace

ParamGroup::ParamGroup(const std::vector<ParamInfo>& params, const Options& options)
    : context_(make_context(params, options)),
      gather_(context_, params, options.post_forward_ranks),
      params_(
          params, gather_.shards(),
          gather_.new_flat_shard(params[0].tensor.is_meta() ? at::TensorOptions(at::kMeta) : context_->shard_options),
          *context_, is_alias(params, options, context_->device)),
      gradients_(params_, context_, options.bucket_bytes),
      pool_(std::make_shared<BlockPool>(context_->device)) {}

void ParamGroup::materialize() {
  TESSERA_ASSERT(params_.is_on_meta() && state_ == ShardedState::Sharded, "{} has memory", params_.module());
  params_.move_to(gather_.shards(), gather_.new_flat_shard(context_->shard_options));
}

void ParamGroup::set_place(int64_t unit, UnitNames names, std::shared_ptr<BlockPool> pool) {
  TESSERA_ASSERT(state_ != ShardedState::Unsharding, "{} gets a place in a tree while it is gathered", name());
  tag_.unit = unit;
  names_ = std::move(names);
  pool_ = std::move(pool);
  gather_.wait_for_readers();
  params_.tag(tag_);
}

std::string_view ParamGroup::name() const {
  return names_ ? names_->at(static_cast<size_t>(tag_.unit)) : params_.module();
}

void ParamGroup::set_reporter(const std::function<void(FSDPEventKind)>& report) {
  report_ = report;
  gradients_.set_reporter(report);
}

void ParamGroup::step(FSDPEventKind step) {
  state_ = next_state(state_, step, gather_.has_post_forward_shard());
  if (report_) {
    report_(step);
  }
}

bool ParamGroup::issue(ShardFault fault) {
  if (state_ != ShardedState::Sharded && state_ != ShardedState::ShardedPostForward) {
    return false;
  }
  const FlightLabel label(name());
  const MemoryLabel memory(MemoryUse::GatheredParameters, name());
  run_step(slots_->unshard, name(), state_, [this, fault] {
    params_.note_gather();
    const auto own = params_.fault();
    tag_.fault = own == ShardFault::None ? fault : own;
    params_.tag(tag_);
    gather_.start(params_, tag_, *pool_, custom_all_gather_ ? custom_all_gather_ : slots_->all_gather);
    step(FSDPEventKind::Gather);
  });
  return true;
}

void ParamGroup::start() {
  is_prefetched_ = false;
  issue(ShardFault::None);
}

void ParamGroup::prefetch(ShardFault fault) {
  is_prefetched_ = issue(fault) || is_prefetched_;
}

void ParamGroup::unshard(const ParamVersions* used) {
  is_prefetched_ = false;
  const auto* changed = used && params_.has_changed_since(*used) ? used : nullptr;
  if (changed && is_unsharded()) {
    params_.check_unchanged_since(*changed);
  }
  const auto fault = changed ? ShardFault::Changed : ShardFault::None;
  issue(fault);
  if (state_ == ShardedState::Unsharding && !finish_unshard(changed)) {
    issue(fault);
    finish_unshard(changed);
  }
}

/// Returns false, and reshards, if a rank did not know whether its parameters may be used when it issued the gather
/// (ShardFault::MaybeChanged); by now it knows. All ranks read that in the tags, so all gather again.
bool ParamGroup::finish_unshard(const ParamVersions* changed) {
  const MemoryLabel memory(MemoryUse::GatheredParameters, name());
  bool is_decided = true;
  const auto drop = [this] {
    drop_gather();
    gather_.wait_for_readers();
  };
  try {
    gather_.wait();
    is_decided = !gather_.is_tagged(ShardFault::MaybeChanged, tag_.fault);
    if (is_decided) {
      params_.check_usable();
      if (changed) {
        params_.check_unchanged_since(*changed);
      }
      gather_.check_tags(tag_.unit, names_);
      gather_.finish(params_, *pool_);
    }
  } catch (...) {
    drop();
    throw;
  }
  if (!is_decided) {
    drop();
    return false;
  }
  params_.to_unsharded();
  params_.expect_no_writes();
  step(FSDPEventKind::Unshard);
  return true;
}

void ParamGroup::drop_gather() {
  gather_.release(params_);
  step(FSDPEventKind::Drop);
}

void ParamGroup::drop_unshard() {
  if (state_ != ShardedState::Unsharding) {
    return;
  }
  gather_.discard();
  drop_gather();
}

void ParamGroup::reshard() {
  const auto fault = is_unsharded() ? params_.lost_write() : std::string();
  reshard_unchecked();
  if (!fault.empty()) {
    throw StateError(fault);
  }
}

void ParamGroup::check_kept() {
  if (is_unsharded() && !params_.lost_write().empty()) {
    reshard();
  }
}

void ParamGroup::reshard_unchecked() {
  drop_unshard();
  if (state_ == ShardedState::Sharded) {
    return;
  }
  run_step(slots_->reshard, name(), state_, [this] { free_params(/*keeps_shard=*/false); });
}

void ParamGroup::reshard_after_forward() {
  if (!gather_.keeps_post_forward_shard() || state_ != ShardedState::Unsharded) {
    reshard();
    return;
  }
  run_step(slots_->reshard, name(), state_, [this] { free_params(/*keeps_shard=*/true); });
}

void ParamGroup::free_params(bool keeps_shard) {
  if (keeps_shard) {
    gather_.keep_post_forward_shard(params(), tag_.unit);
  }
  if (state_ == ShardedState::Unsharded) {
    params_.to_sharded();
  }
  if (!keeps_shard) {
    gather_.drop_post_forward_shard();
  }
  step(keeps_shard ? FSDPEventKind::ReshardPostForward : FSDPEventKind::Reshard);
  gather_.wait_for_readers();
}

void ParamGroup::abort_backward(bool reshards) {
  try {
    if (reshards) {
      reshard_unchecked();
    }
  } catch (const CommError&) {
    // The gradients are still sent; the next user of the group gets the error.
  }
  gradients_.abort();
}

}  // namespace tessera
