#include "fully_shard/reduce/gradient_reduction.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/error.h"
#include "fully_shard/memory/side_stream.h"

namespace tessera {

GradientReduction::GradientReduction(Options options)
    : options_(std::move(options)), scatter_stream_(shared_stream<ReduceScatterStream>(options_.device)) {
  if (options_.axes.replica_axis) {
    stream_ = shared_stream<AllReduceStream>(options_.device);
  } else {
    stream_ = scatter_stream_;
  }
}

/// For the parameters that are trained now.
void GradientReduction::plan(std::span<const ShardedParam> params) {
  if (message_.is_of(params)) {
    return;
  }
  TESSERA_CHECK(StateError, !has_partial(),
                "{}: requires_grad of a parameter of {} changed while gradients wait for their all-reduce; "
                "run a backward with set_requires_all_reduce(true) first",
                options_.api, params[0].origin().module);
  message_ = ReduceScatterLayout(params, {.axes = options_.axes,
                                          .dtype = options_.reduce_dtype,
                                          .device = options_.device,
                                          .dims = options_.dims,
                                          .is_read_on_host = options_.grad_options.device().is_cpu()});
  const auto pieces = message_.pieces(options_.axes.shard_rank());
  flat_gradient_ = FlatGradient(pieces, numel(), options_.grad_options.dtype(params[pieces.at(0).param].dtype()));
  input_ = PooledBuffer(options_.axes.num_shards() * numel(), buffer_options());
  output_buffer_ = PooledBuffer(numel(), buffer_options());
}

const at::Tensor& GradientReduction::choose_output(std::span<const ShardedParam> params, BlockPool& pool) {
  if (options_.device == options_.grad_options.device() && flat_gradient_.can_be_result(params, message_.dtype())) {
    output_ = flat_gradient_.ensure(params);
  } else {
    output_ = output_buffer_.acquire(pool);
  }
  return output_;
}

void GradientReduction::collect(std::span<ShardedParam> params, const GradientSettings& settings) {
  TESSERA_ASSERT(!in_flight(), "a reduction of {} is in flight already", params[0].origin().module);
  const at::AutoDispatchBelowADInplaceOrView below;
  plan(params);
  scale_ = gradient_scale({.num_ranks = options_.axes.mesh.size(),
                           .divide_factor = settings.divide_factor,
                           .force_sum = settings.force_sum,
                           .reduce_dtype = message_.dtype()});
  hook_ = settings.all_reduce_hook;
  reduce_scatter_ = settings.reduce_scatter ? settings.reduce_scatter : slots_->reduce_scatter;
  all_reduce_ = settings.all_reduce ? settings.all_reduce : slots_->all_reduce;
  has_own_all_reduce_ = settings.all_reduce != nullptr;
  all_reduces_ = options_.axes.replica_axis && settings.requires_all_reduce;
  message_.collect(params);
  stage_ = Stage::Collected;
}

void GradientReduction::start(std::span<ShardedParam> params, BlockPool& pool) {
  TESSERA_ASSERT(stage_ == Stage::Collected, "gradients of {} were not collected", params[0].origin().module);
  const at::AutoDispatchBelowADInplaceOrView below;
  if (scale_.before == 1 && message_.can_be_segments() && is_default(reduce_scatter_)) {
    stage_ = Stage::ReduceScatter;
    pending_ = reduce_scatter_segments_async(choose_output(params, pool), message_.take_segments(), scale_.op,
                                             options_.axes.shard_group());
    stream_->wait_for_current();
    return;
  }
  const bool scatters = options_.axes.num_shards() > 1;
  const auto& input = scatters ? input_.acquire(pool) : choose_output(params, pool);
  copy_in(input);
  stage_ = Stage::ReduceScatter;
  if (scatters) {
    pending_ = reduce_scatter_(choose_output(params, pool), input, scale_.op, options_.axes.shard_group());
  }
  stream_->wait_for_current();
  if (!scatters && all_reduces_) {
    issue_all_reduce();
  }
}

bool GradientReduction::can_share() const {
  return options_.axes.num_shards() == 1 && all_reduces_ && !has_own_all_reduce_ && !has_partial();
}

bool GradientReduction::can_share_with(const GradientReduction& other) const {
  return replica_group() == other.replica_group() && scale_.op == other.scale_.op &&
         message_.dtype() == other.message_.dtype() && options_.device == other.options_.device;
}

void GradientReduction::copy_in(const at::Tensor& buffer) {
  message_.copy_to(buffer);
  if (scale_.before != 1) {
    buffer.div_(scale_.before);
  }
}

void GradientReduction::start_in(const at::Tensor& buffer) {
  TESSERA_ASSERT(stage_ == Stage::Collected && can_share(), "a reduction that cannot share its all-reduce");
  const at::AutoDispatchBelowADInplaceOrView below;
  copy_in(buffer);
  stream_->wait_for_current();
  output_ = buffer;
  stage_ = Stage::AllReduce;
}

void GradientReduction::issue_all_reduce() {
  const SideStream::Scope scope(*stream_);
  if (partial_.defined()) {
    output_.add_(partial_);
    partial_ = at::Tensor();
  }
  pending_ = all_reduce_(output_, scale_.op, options_.axes.replica_group());
  stage_ = Stage::AllReduce;
}

void GradientReduction::wait_for_pending() {
  try {
    pending_.wait();
  } catch (...) {
    leave_memory();
    throw;
  }
}

/// As that of a gather (all_gather.cpp): peers may still read and write what a collective that failed has, which its
/// work keeps.
void GradientReduction::leave_memory() {
  input_ = PooledBuffer(options_.axes.num_shards() * numel(), buffer_options());
  output_buffer_ = PooledBuffer(numel(), buffer_options());
  flat_gradient_.leave_memory();
  message_.leave_memory();
}

/// The computing stream waits too: the next unit's gradients get this one's buffer.
void GradientReduction::end_reduce_scatter() {
  {
    const SideStream::Scope scope(*scatter_stream_);
    wait_for_pending();
    scattered_ = std::move(pending_);
  }
  const StreamEvent scattered = scatter_stream_->mark();
  scattered.wait();
  stream_->wait_for(scattered);
  input_.release();
}

/// The next backward may write its sums where these lie.
void GradientReduction::keep_partial() {
  {
    const SideStream::Scope scope(*stream_);
    partial_ = partial_.defined() ? partial_.add_(output_) : output_.clone();
  }
  stream_->mark().wait();
}

bool GradientReduction::start_all_reduce(std::span<ShardedParam> params) {
  TESSERA_ASSERT(in_flight(), "no reduction of {} is in flight", params[0].origin().module);
  if (stage_ == Stage::AllReduce) {
    return true;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  end_reduce_scatter();
  if (all_reduces_) {
    issue_all_reduce();
    return true;
  }
  if (!options_.axes.replica_axis) {
    finish(params);
    return false;
  }
  keep_partial();
  restore_stashed_grads(params);
  end();
  return false;
}

void GradientReduction::finish(std::span<ShardedParam> params) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (stage_ == Stage::HostCopy) {
    copied_.synchronize();
    output_ = host_output_;
  } else {
    const SideStream::Scope scope(*stream_);
    wait_for_pending();
    scale_result();
    if (output_.device() != options_.grad_options.device()) {
      start_host_copy(params);
      return;
    }
  }
  check_frozen_alike(params);
  hand_out(params);
  end();
}

/// What was added up is of different parameters otherwise.
void GradientReduction::check_frozen_alike(std::span<ShardedParam> params) {
  const auto frozen = message_.frozen_elsewhere(output_);
  if (!frozen) {
    return;
  }
  restore_stashed_grads(params);
  end();
  const auto& origin = params[*frozen].origin();
  throw StateError(fmt::format(
      "{}: parameter '{}' of {} is trained on this rank, and frozen (requires_grad is false) on another, so that "
      "gradients of different parameters would be added up. Freeze the same parameters on all ranks",
      options_.api, origin.name, origin.module));
}

void GradientReduction::scale_result() {
  if (hook_) {
    hook_(output_.narrow(0, 0, message_.gradients_numel()));
  }
  if (scale_.after != 1) {
    output_.div_(scale_.after);
  }
}

/// What is copied stays until finish() has waited, so that no other work gets its memory.
void GradientReduction::start_host_copy(std::span<const ShardedParam> params) {
  host_output_ = flat_gradient_.can_be_result(params, message_.dtype())
                     ? flat_gradient_.ensure(params)
                     : at::empty({numel()}, options_.grad_options.dtype(message_.dtype()));
  const auto stream = shared_stream<HostCopyStream>(options_.device);
  stream->wait_for_current();
  const SideStream::Scope scope(*stream);
  host_output_.copy_(output_, /*non_blocking=*/true);
  copied_ = StreamEvent::here(options_.device);
  stage_ = Stage::HostCopy;
}

/// A user's reduction may bring gradients of ranks whose flags do not come here: then all count as used, and agree on
/// it.
void GradientReduction::hand_out(std::span<ShardedParam> params) {
  const auto used = [&] {
    const SideStream::Scope scope(*stream_);
    return hook_ ? std::vector<bool>(message_.size(), true) : message_.used(output_);
  };
  flat_gradient_.hand_out(output_, params, used(), *stream_);
}

void GradientReduction::end() {
  output_ = at::Tensor();
  host_output_ = at::Tensor();
  copied_ = StreamEvent();
  stream_->defer_free(output_buffer_.release());
  stage_ = Stage::Idle;
}

void GradientReduction::discard() {
  const bool was_read = scattered_.discard();
  const bool has_ended = !in_flight() || pending_.discard();
  if (!was_read || !has_ended) {
    leave_memory();
  }
  if (in_flight()) {
    stream_->drain();
    copied_.synchronize();
    input_.release();
    message_.clear();
    end();
  }
  partial_ = at::Tensor();
}

}  // namespace tessera
