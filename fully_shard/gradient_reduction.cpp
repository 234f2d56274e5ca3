#include "fully_shard/gradient_reduction.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/error.h"
#include "fully_shard/side_stream.h"

namespace tessera {

GradientReduction::GradientReduction(Options options)
    : options_(std::move(options)), scatter_stream_(shared_stream<ReduceScatterStream>(options_.device)) {
  if (options_.axes.replica_axis) {
    stream_ = shared_stream<AllReduceStream>(options_.device);
  } else {
    stream_ = scatter_stream_;
  }
}

bool GradientReduction::FlatGrad::is_free() const {
  const auto is_held_here_alone = [](const at::Tensor& grad) {
    const auto meta = grad.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr();
    return grad.use_count() == 1 && meta.use_count() == 2;  // detached copies of a DTensor share its meta
  };
  return flat.defined() && flat.storage().use_count() == 1 + grads.size() &&
         std::ranges::all_of(grads, is_held_here_alone);
}

void GradientReduction::ensure_flat_grad(std::span<const ShardedParam> params) {
  if (flat_grad_.is_free()) {
    return;
  }
  flat_grad_ = {.flat = at::empty({numel_}, grad_options_), .grads = {}};
  const int64_t rank = options_.axes.shard_rank();
  for (size_t i = 0; i < members_.size(); ++i) {
    const auto& param = params[members_[i]];
    const auto& slot = layout_.slots[i];
    auto local = flat_grad_.flat.narrow(0, slot.offset, slot.numel_of(rank, layout_.num_ranks));
    flat_grad_.grads.push_back(wrap_local(local.view(param.spec()->local_sizes()), param.spec(), param.grad_origin()));
  }
}

/// Whether the result is the flat gradient itself: nothing is added to it and nothing cast.
bool GradientReduction::is_flat_grad(std::span<const ShardedParam> params) const {
  return reduce_dtype_ == grad_options_.dtype() && std::none_of(members_.begin(), members_.end(), [&](size_t i) {
           return params[i].stashed_grad().defined() || params[i].has_sharded_grad();
         });
}

const at::Tensor& GradientReduction::choose_output(std::span<const ShardedParam> params, BlockPool& pool) {
  if (options_.device == grad_options_.device() && is_flat_grad(params)) {
    ensure_flat_grad(params);
    output_ = flat_grad_.flat;
  } else {
    output_ = output_buffer_.borrow(pool);
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
                           .reduce_dtype = reduce_dtype_});
  hook_ = settings.all_reduce_hook;
  reduce_scatter_ = settings.reduce_scatter ? settings.reduce_scatter : slots_->reduce_scatter;
  all_reduce_ = settings.all_reduce ? settings.all_reduce : slots_->all_reduce;
  has_own_all_reduce_ = settings.all_reduce != nullptr;
  all_reduces_ = options_.axes.replica_axis && settings.requires_all_reduce;
  has_grad_.clear();
  grads_.clear();  // of a collect() that threw
  for (auto i : members_) {
    auto grad = params[i].take_unsharded_grad(reduce_dtype_);
    has_grad_.push_back(grad.defined());
    grads_.push_back(grad.defined() ? grad.contiguous() : at::Tensor());
  }
  stage_ = Stage::Collected;
}

void GradientReduction::start(std::span<ShardedParam> params, BlockPool& pool) {
  TESSERA_ASSERT(stage_ == Stage::Collected, "gradients of {} were not collected", params[0].origin().module);
  const at::AutoDispatchBelowADInplaceOrView below;
  if (can_send_in_place()) {
    stage_ = Stage::ReduceScatter;
    pending_ = reduce_scatter_parts_async(choose_output(params, pool), gradient_parts(), scale_.op,
                                          options_.axes.shard_group());
    stream_->wait_for_current();
    return;
  }
  const bool scatters = layout_.num_ranks > 1;
  const auto& input = scatters ? input_.borrow(pool) : choose_output(params, pool);
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
  return layout_.num_ranks == 1 && all_reduces_ && !has_own_all_reduce_ && !has_partial();
}

bool GradientReduction::can_share_with(const GradientReduction& other) const {
  return replica_group() == other.replica_group() && scale_.op == other.scale_.op &&
         reduce_dtype_ == other.reduce_dtype_ && options_.device == other.options_.device;
}

at::TensorOptions GradientReduction::buffer_options() const {
  return at::TensorOptions(options_.device).dtype(reduce_dtype_);
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

/// The computing stream waits too: the next unit's gradients get this one's buffer.
void GradientReduction::end_reduce_scatter() {
  {
    const SideStream::Scope scope(*scatter_stream_);
    pending_.wait();
    scattered_ = std::move(pending_);
  }
  const StreamMark scattered = scatter_stream_->mark();
  scattered.wait();
  stream_->wait_for(scattered);
  input_.give_back();
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
    pending_.wait();
    scale_result();
    if (output_.device() != grad_options_.device()) {
      start_host_copy(params);
      return;
    }
  }
  write_back(params);
  end();
}

void GradientReduction::scale_result() {
  if (hook_) {
    hook_(output_.narrow(0, 0, layout_.shard_numel));
  }
  if (scale_.after != 1) {
    output_.div_(scale_.after);
  }
}

/// What is copied stays until finish() has waited, so that no other work gets its memory.
void GradientReduction::start_host_copy(std::span<const ShardedParam> params) {
  if (is_flat_grad(params)) {
    ensure_flat_grad(params);
    host_output_ = flat_grad_.flat;
  } else {
    host_output_ = at::empty({numel_}, grad_options_.dtype(reduce_dtype_));
  }
  const auto stream = shared_stream<HostCopyStream>(options_.device);
  stream->wait_for_current();
  const SideStream::Scope scope(*stream);
  host_output_.copy_(output_, /*non_blocking=*/true);
  copied_ = StreamMark::here(options_.device);
  stage_ = Stage::HostCopy;
}

/// Whether what was set aside is all of the kept flat gradient, so that one addition serves all parameters.
bool GradientReduction::adds_up_flat(std::span<const ShardedParam> params, const std::vector<bool>& used) const {
  for (size_t i = 0; i < members_.size(); ++i) {
    if (!used[i] || flat_grad_.grads.empty() || !params[members_[i]].stashed_grad().is_same(flat_grad_.grads[i])) {
      return false;
    }
  }
  return true;
}

void GradientReduction::write_back(std::span<ShardedParam> params) {
  for (auto i : members_) {
    params[i].stash_sharded_grad();
  }
  const auto used = used_members();
  const bool is_direct = flat_grad_.flat.defined() && output_.is_same(flat_grad_.flat);
  if (adds_up_flat(params, used)) {
    const SideStream::Scope scope(*stream_);
    flat_grad_.flat.add_(output_);
    restore_stashed_grads(params);
    return;
  }
  const int64_t rank = options_.axes.shard_rank();
  const auto part = [&](size_t i) {
    const auto& slot = layout_.slots[i];
    return output_.narrow(0, slot.offset, slot.numel_of(rank, layout_.num_ranks))
        .view(params[members_[i]].spec()->local_sizes());
  };
  const auto stashed = [&](size_t i) -> const at::Tensor& { return params[members_[i]].stashed_grad(); };
  bool needs_new = false;
  for (size_t i = 0; i < members_.size(); ++i) {
    needs_new = needs_new || (used[i] && !is_direct && !stashed(i).defined());
  }
  if (needs_new && !flat_grad_.is_free()) {
    ensure_flat_grad(params);
    stream_->wait_for_current();  // whose memory it is
  }
  const SideStream::Scope scope(*stream_);
  for (size_t i = 0; i < members_.size(); ++i) {
    if (used[i] && stashed(i).defined()) {
      dtensor_meta(stashed(i))->local.add_(part(i));
    }
  }
  if (needs_new) {
    flat_grad_.flat.copy_(output_);
  }
  for (size_t i = 0; i < members_.size(); ++i) {
    if (used[i] && !stashed(i).defined()) {
      params[members_[i]].set_sharded_grad(flat_grad_.grads[i]);
    }
  }
  restore_stashed_grads(params);
}

void GradientReduction::end() {
  output_ = at::Tensor();
  host_output_ = at::Tensor();
  copied_ = StreamMark();
  stream_->retire(output_buffer_.give_back());
  stage_ = Stage::Idle;
}

void GradientReduction::discard() {
  scattered_.discard();
  if (in_flight()) {
    pending_.discard();
    stream_->drain();
    copied_.synchronize();
    input_.give_back();
    grads_.clear();
    end();
  }
  partial_ = at::Tensor();
}

}  // namespace tessera
