#include "fully_shard/reduce/gradient_reducer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <cmath>

#include "base/error.h"

namespace tessera {

GradientScale gradient_scale(const GradientScaleOptions& options) {
  if (!options.divide_factor && !options.force_sum) {
    return {};
  }
  const double factor = options.divide_factor.value_or(static_cast<double>(options.num_ranks));
  double before = 1;
  if (options.reduce_dtype == at::kHalf) {
    while (std::fmod(factor, before) == 0 && factor / before > before) {
      before *= 2;
    }
  }
  return {.before = before, .op = ReduceOp::Sum, .after = factor / before};
}

GradientReducer::GradientReducer(std::span<ShardedParam> params, UnitContextPtr context, Reporter report)
    : params_(params),
      context_(std::move(context)),
      report_(std::move(report)),
      scatter_stream_(shared_lane(LaneKind::ReduceScatter, context_->device)) {
  if (context_->axes.replica_axis) {
    stream_ = shared_lane(LaneKind::AllReduce, context_->device);
  } else {
    stream_ = scatter_stream_;
  }
}

/// Makes the layout for the parameters that are trained now.
void GradientReducer::plan() {
  if (layout_.matches(params_)) {
    return;
  }
  TESSERA_CHECK(StateError, !has_partial(),
                "{}: requires_grad of a parameter of {} changed while gradients wait for their all-reduce; "
                "run a backward with set_requires_all_reduce(true) first",
                context_->api, params_[0].origin().module);
  layout_ = ReduceScatterLayout(params_, *context_);
  const auto pieces = layout_.pieces(context_->axes.shard_rank());
  flat_gradient_ =
      FlatGradient(pieces, layout_.numel(), context_->shard_options.dtype(params_[pieces.at(0).param].spec()->dtype()));
  make_buffers();
}

void GradientReducer::make_buffers() {
  input_ = PooledBuffer(context_->axes.num_shards() * layout_.numel(), layout_.options());
  output_buffer_ = PooledBuffer(layout_.numel(), layout_.options());
}

const at::Tensor& GradientReducer::choose_output(BlockPool& pool) {
  if (!context_->is_offloaded() && flat_gradient_.can_be_result(params_, layout_.dtype())) {
    current_.output = flat_gradient_.ensure(params_);
  } else {
    current_.output = output_buffer_.acquire(pool);
  }
  return current_.output;
}

bool GradientReducer::collect(const GradientSettings& settings) {
  TESSERA_ASSERT(!in_flight(), "a reduction of {} is in flight already", params_[0].origin().module);
  if (!has_trainable(params_)) {
    restore_stashed_grads(params_);
    return false;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  plan();
  current_.scale = gradient_scale({.num_ranks = context_->axes.mesh.size(),
                                   .divide_factor = settings.divide_factor,
                                   .force_sum = settings.force_sum,
                                   .reduce_dtype = layout_.dtype()});
  current_.settings = settings;
  current_.has_own_all_reduce = settings.all_reduce != nullptr;
  if (!current_.settings.reduce_scatter) {
    current_.settings.reduce_scatter = slots_->reduce_scatter;
  }
  if (!current_.settings.all_reduce) {
    current_.settings.all_reduce = slots_->all_reduce;
  }
  layout_.collect(params_);
  stage_ = Stage::Collected;
  return true;
}

void GradientReducer::start(BlockPool& pool) {
  TESSERA_ASSERT(stage_ == Stage::Collected, "gradients of {} were not collected", params_[0].origin().module);
  const at::AutoDispatchBelowADInplaceOrView below;
  const bool scatters = context_->axes.num_shards() > 1;
  if (scatters) {
    issue_reduce_scatter(pool);
  } else {
    copy_in(choose_output(pool));
    stage_ = Stage::ReduceScatter;
  }
  stream_->wait_for_current();
  if (!scatters && all_reduces()) {
    issue_all_reduce();
  } else {
    report_(FSDPEventKind::ReduceScatter);
  }
}

/// Sends the gradients in place if the group supports it.
void GradientReducer::issue_reduce_scatter(BlockPool& pool) {
  const auto& group = context_->axes.shard_group();
  if (current_.scale.before == 1 && layout_.can_be_segments() && is_default(current_.settings.reduce_scatter)) {
    stage_ = Stage::ReduceScatter;
    current_.pending =
        reduce_scatter_segments_async(choose_output(pool), layout_.take_segments(), current_.scale.op, group);
    return;
  }
  const auto& input = input_.acquire(pool);
  copy_in(input);
  stage_ = Stage::ReduceScatter;
  current_.pending = current_.settings.reduce_scatter(choose_output(pool), input, current_.scale.op, group);
}

bool GradientReducer::can_share() const {
  return context_->axes.num_shards() == 1 && all_reduces() && !current_.has_own_all_reduce && !has_partial();
}

void GradientReducer::copy_in(const at::Tensor& buffer) {
  layout_.copy_to(buffer);
  if (current_.scale.before != 1) {
    buffer.div_(current_.scale.before);
  }
}

void GradientReducer::start_in(const at::Tensor& buffer) {
  TESSERA_ASSERT(stage_ == Stage::Collected && can_share(), "a reduction that cannot share its all-reduce");
  const at::AutoDispatchBelowADInplaceOrView below;
  copy_in(buffer);
  stream_->wait_for_current();
  current_.output = buffer;
  stage_ = Stage::AllReduce;
  report_(FSDPEventKind::AllReduce);
}

void GradientReducer::issue_all_reduce() {
  const StreamLane::Scope scope(*stream_);
  if (partial_.defined()) {
    current_.output.add_(partial_);
    partial_ = at::Tensor();
  }
  current_.pending = current_.settings.all_reduce(current_.output, current_.scale.op, context_->axes.replica_group());
  stage_ = Stage::AllReduce;
  report_(FSDPEventKind::AllReduce);
}

void GradientReducer::wait_for_pending() {
  try {
    current_.pending.wait();
  } catch (...) {
    leave_memory();
    throw;
  }
}

/// Abandons memory like a gather (all_gather.cpp): peers may still access the tensors of a failed collective, which its
/// work keeps.
void GradientReducer::leave_memory() {
  make_buffers();
  flat_gradient_.leave_memory();
  layout_.leave_memory();
}

/// The compute stream waits too, because the next unit's gradients reuse this one's buffer.
void GradientReducer::end_reduce_scatter() {
  {
    const StreamLane::Scope scope(*scatter_stream_);
    wait_for_pending();
    scattered_ = std::move(current_.pending);
  }
  const StreamEvent scattered = scatter_stream_->mark();
  scattered.wait();
  stream_->wait_for(scattered);
  input_.release();
}

bool GradientReducer::start_all_reduce() {
  TESSERA_ASSERT(in_flight(), "no reduction of {} is in flight", params_[0].origin().module);
  if (stage_ == Stage::AllReduce) {
    return true;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  end_reduce_scatter();
  if (all_reduces()) {
    issue_all_reduce();
    return true;
  }
  if (!context_->axes.replica_axis) {
    finish();
    return false;
  }
  {
    const StreamLane::Scope scope(*stream_);
    // A copy, because the next backward may write its sums to this memory.
    partial_ = partial_.defined() ? partial_.add_(current_.output) : current_.output.clone();
  }
  stream_->mark().wait();
  restore_stashed_grads(params_);
  end();
  report_(FSDPEventKind::Reduced);
  return false;
}

void GradientReducer::finish() {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (stage_ == Stage::HostCopy) {
    current_.copied.synchronize();
    current_.output = current_.host_output;
  } else {
    const StreamLane::Scope scope(*stream_);
    wait_for_pending();
    if (current_.settings.all_reduce_hook) {
      current_.settings.all_reduce_hook(current_.output.narrow(0, 0, layout_.gradients_numel()));
    }
    if (current_.scale.after != 1) {
      current_.output.div_(current_.scale.after);
    }
    if (context_->is_offloaded()) {
      start_host_copy();
      return;
    }
  }
  hand_out();
  end();
  report_(FSDPEventKind::Reduced);
}

/// The copied tensor is kept until finish() has waited, so that no other work gets its memory.
void GradientReducer::start_host_copy() {
  current_.host_output = flat_gradient_.can_be_result(params_, layout_.dtype())
                             ? flat_gradient_.ensure(params_)
                             : at::empty({layout_.numel()}, context_->shard_options.dtype(layout_.dtype()));
  const auto stream = shared_lane(LaneKind::HostCopy, context_->device);
  stream->wait_for_current();
  const StreamLane::Scope scope(*stream);
  current_.host_output.copy_(current_.output, /*non_blocking=*/true);
  current_.copied = StreamEvent::here(context_->device);
  stage_ = Stage::HostCopy;
}

/// If ranks froze different parameters, different gradients were summed. A user's reduction may add gradients of ranks
/// whose flags do not arrive here; then all parameters count as used, on all ranks.
void GradientReducer::hand_out() {
  if (const auto frozen = layout_.frozen_elsewhere(current_.output)) {
    restore_stashed_grads(params_);
    end();
    const auto& origin = params_[*frozen].origin();
    throw StateError(fmt::format(
        "{}: parameter '{}' of {} is trained on this rank, and frozen (requires_grad is false) on another, so that "
        "gradients of different parameters would be added up. Freeze the same parameters on all ranks",
        context_->api, origin.name, origin.module));
  }
  const auto used = [&] {
    const StreamLane::Scope scope(*stream_);
    return current_.settings.all_reduce_hook ? std::vector<bool>(layout_.size(), true) : layout_.used(current_.output);
  };
  flat_gradient_.hand_out(current_.output, params_, used(), *stream_);
}

void GradientReducer::end() {
  current_ = {};
  stream_->defer_free_of_current(output_buffer_.release());
  stage_ = Stage::Idle;
}

void GradientReducer::discard() {
  const bool was_read = scattered_.discard();
  const bool has_ended = !in_flight() || current_.pending.discard();
  if (!was_read || !has_ended) {
    leave_memory();
  }
  if (in_flight()) {
    stream_->drain();
    current_.copied.synchronize();
    input_.release();
    layout_.clear();
    end();
  }
  partial_ = at::Tensor();
}

}  // namespace tessera
