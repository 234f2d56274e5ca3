#include "fully_shard/gradient_reduction.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/error.h"
#include "fully_shard/block_copy.h"

namespace tessera {

bool GradientReduction::FlatGrad::is_free() const {
  return flat.defined() && flat.storage().use_count() == 1 + grads.size() &&
         std::all_of(grads.begin(), grads.end(), [](const auto& grad) { return grad.use_count() == 1; });
}

/// Frozen parameters are not sent. Which are frozen is a matter of the model, so ranks agree on it.
void GradientReduction::plan(const std::vector<ShardedParam>& params) {
  std::vector<bool> trainable;
  for (const auto& param : params) {
    trainable.push_back(param.requires_grad());
  }
  if (trainable == trainable_) {
    return;
  }
  TESSERA_CHECK(StateError, !has_partial(),
                "fully_shard: requires_grad of a parameter of {} changed while gradients wait for their all-reduce; "
                "run a backward with set_requires_all_reduce(true) first",
                params[0].origin().module);
  trainable_ = std::move(trainable);
  members_.clear();
  std::vector<std::vector<int64_t>> shapes;
  std::vector<int64_t> dims;
  for (size_t i = 0; i < params.size(); ++i) {
    if (trainable_[i]) {
      members_.push_back(i);
      shapes.push_back(params[i].unsharded().sizes().vec());
      dims.push_back(options_.dims[i]);
    }
  }
  const int64_t ranks = options_.axes.num_shards();
  layout_ = make_param_layout(shapes, ranks, dims);
  numel_ = layout_.shard_numel + aligned_numel(static_cast<int64_t>(members_.size()));
  copies_.clear();
  for (const auto& slot : layout_.slots) {
    copies_.push_back(layout_.copies(slot, numel_));
  }
  unused_ = layout_.unused(numel_);
  const auto tensor_options = at::TensorOptions().dtype(options_.reduce_dtype).device(options_.device);
  input_ = PooledBuffer(ranks * numel_, tensor_options);
  output_buffer_ = PooledBuffer(numel_, tensor_options);
  flat_grad_ = {};
}

/// The flags of float buffers on the CPU are written and read without an op of libtorch, which would cost more than the
/// copies of a unit of small parameters.
void GradientReduction::write_flags(const std::vector<at::Tensor>& grads, const at::Tensor& buffer) const {
  const int64_t flags = numel_ - layout_.shard_numel;
  const bool is_direct = buffer.device().is_cpu() && buffer.scalar_type() == at::kFloat;
  const auto host = is_direct ? buffer : at::empty({layout_.num_ranks * numel_}, at::kFloat);
  auto* data = static_cast<float*>(host.unsafeGetTensorImpl()->mutable_data());
  for (int64_t rank = 0; rank < layout_.num_ranks; ++rank) {
    auto* flag = data + rank * numel_ + layout_.shard_numel;
    std::fill(flag, flag + flags, 0.f);
    for (size_t i = 0; i < grads.size(); ++i) {
      flag[i] = grads[i].defined() ? 1.f : 0.f;
    }
  }
  if (!is_direct) {
    const auto of_flags = [&](const at::Tensor& tensor) {
      return tensor.view({layout_.num_ranks, numel_}).narrow(1, layout_.shard_numel, flags);
    };
    of_flags(buffer).copy_(of_flags(host));
  }
}

std::vector<bool> GradientReduction::read_flags() const {
  const bool is_direct = output_.device().is_cpu() && output_.scalar_type() == at::kFloat;
  at::Tensor host;
  if (!is_direct) {
    const auto flags = output_.narrow(0, layout_.shard_numel, static_cast<int64_t>(members_.size()));
    host = flags.to(at::kCPU, at::kFloat);
  }
  const auto* data = is_direct ? output_.const_data_ptr<float>() + layout_.shard_numel : host.const_data_ptr<float>();
  std::vector<bool> used;
  used.reserve(members_.size());
  for (size_t i = 0; i < members_.size(); ++i) {
    used.push_back(data[i] > 0);
  }
  return used;
}

void GradientReduction::copy_in(std::vector<ShardedParam>& params, const at::Tensor& buffer) {
  std::vector<at::Tensor> grads;
  BlockCopier copier;
  std::vector<FlatRange> missing;
  for (size_t i = 0; i < members_.size(); ++i) {
    auto grad = params[members_[i]].take_unsharded_grad(options_.reduce_dtype);
    if (grad.defined()) {
      grad = grad.contiguous();
      copier.to_flat(grad, buffer, copies_[i]);
    } else {
      for (int64_t rank = 0; rank < layout_.num_ranks; ++rank) {
        missing.push_back({rank * numel_ + layout_.slots[i].offset, layout_.slots[i].chunk_numel});
      }
    }
    grads.push_back(std::move(grad));
  }
  copier.run();
  zero_ranges(buffer, missing);
  zero_ranges(buffer, unused_);
  write_flags(grads, buffer);
}

void GradientReduction::ensure_flat_grad(const std::vector<ShardedParam>& params) {
  if (flat_grad_.is_free()) {
    return;
  }
  flat_grad_ = {.flat = at::empty({numel_}, options_.grad_options), .grads = {}};
  const int64_t rank = options_.axes.shard_rank();
  for (size_t i = 0; i < members_.size(); ++i) {
    const auto& param = params[members_[i]];
    const auto& slot = layout_.slots[i];
    auto local = flat_grad_.flat.narrow(0, slot.offset, slot.numel_of(rank, layout_.num_ranks));
    flat_grad_.grads.push_back(wrap_local(local.view(param.spec()->local_sizes()), param.spec(), param.grad_origin()));
  }
}

/// The flat gradient itself where nothing is added to it and nothing cast.
const at::Tensor& GradientReduction::choose_output(const std::vector<ShardedParam>& params, BlockPool& pool) {
  const bool accumulates = std::any_of(members_.begin(), members_.end(), [&](size_t i) {
    return params[i].stashed_grad().defined() || params[i].has_sharded_grad();
  });
  const auto& grad = options_.grad_options;
  if (!accumulates && options_.reduce_dtype == grad.dtype() && options_.device == grad.device()) {
    ensure_flat_grad(params);
    output_ = flat_grad_.flat;
  } else {
    output_ = output_buffer_.borrow(pool);
  }
  return output_;
}

void GradientReduction::start(std::vector<ShardedParam>& params, const GradientSettings& settings, BlockPool& pool) {
  TESSERA_ASSERT(!in_flight(), "a reduction of {} is in flight already", params[0].origin().module);
  const at::AutoDispatchBelowADInplaceOrView below;
  plan(params);
  scale_ = gradient_scale({.num_ranks = options_.axes.mesh.size(),
                           .divide_factor = settings.divide_factor,
                           .force_sum = settings.force_sum,
                           .reduce_dtype = options_.reduce_dtype});
  hook_ = settings.all_reduce_hook;
  all_reduce_ = settings.all_reduce ? settings.all_reduce : slots_->all_reduce;
  all_reduces_ = options_.axes.replica_axis && settings.requires_all_reduce;
  const bool scatters = layout_.num_ranks > 1;
  const auto& input = scatters ? input_.borrow(pool) : choose_output(params, pool);
  copy_in(params, input);
  if (scale_.before != 1) {
    input.div_(scale_.before);
  }
  stage_ = Stage::ReduceScatter;
  if (scatters) {
    const auto& reduce_scatter = settings.reduce_scatter ? settings.reduce_scatter : slots_->reduce_scatter;
    pending_ = reduce_scatter(choose_output(params, pool), input, scale_.op, options_.axes.shard_group());
  } else if (all_reduces_) {
    issue_all_reduce();
  }
}

void GradientReduction::issue_all_reduce() {
  if (partial_.defined()) {
    output_.add_(partial_);
    partial_ = at::Tensor();
  }
  pending_ = all_reduce_(output_, scale_.op, options_.axes.replica_group());
  stage_ = Stage::AllReduce;
}

bool GradientReduction::start_all_reduce(std::vector<ShardedParam>& params) {
  TESSERA_ASSERT(in_flight(), "no reduction of {} is in flight", params[0].origin().module);
  if (stage_ == Stage::AllReduce) {
    return true;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  pending_.wait();
  input_.give_back();
  if (all_reduces_) {
    issue_all_reduce();
    return true;
  }
  if (!options_.axes.replica_axis) {
    finish(params);
    return false;
  }
  partial_ = partial_.defined() ? partial_.add_(output_) : output_.clone();
  for (auto i : members_) {
    params[i].restore_stashed_grad();
  }
  end();
  return false;
}

void GradientReduction::finish(std::vector<ShardedParam>& params) {
  const at::AutoDispatchBelowADInplaceOrView below;
  pending_.wait();
  if (hook_) {
    hook_(output_.narrow(0, 0, layout_.shard_numel));
  }
  if (scale_.after != 1) {
    output_.div_(scale_.after);
  }
  write_back(params);
  end();
}

/// Whether what was set aside is all of the kept flat gradient, so that one addition serves all parameters.
bool GradientReduction::adds_up_flat(const std::vector<ShardedParam>& params, const std::vector<bool>& used) const {
  for (size_t i = 0; i < members_.size(); ++i) {
    if (!used[i] || flat_grad_.grads.empty() || !params[members_[i]].stashed_grad().is_same(flat_grad_.grads[i])) {
      return false;
    }
  }
  return true;
}

void GradientReduction::write_back(std::vector<ShardedParam>& params) {
  for (auto i : members_) {
    params[i].stash_sharded_grad();
  }
  if (output_.device() != options_.grad_options.device()) {
    output_ = output_.to(options_.grad_options.device());
  }
  const auto used = read_flags();
  const bool is_direct = flat_grad_.flat.defined() && output_.is_same(flat_grad_.flat);
  if (adds_up_flat(params, used)) {
    flat_grad_.flat.add_(output_);
    for (auto i : members_) {
      params[i].restore_stashed_grad();
    }
    return;
  }
  const int64_t rank = options_.axes.shard_rank();
  const auto part = [&](size_t i) {
    const auto& slot = layout_.slots[i];
    return output_.narrow(0, slot.offset, slot.numel_of(rank, layout_.num_ranks))
        .view(params[members_[i]].spec()->local_sizes());
  };
  bool needs_new = false;
  for (size_t i = 0; i < members_.size(); ++i) {
    const auto& stashed = params[members_[i]].stashed_grad();
    needs_new = needs_new || (used[i] && !stashed.defined());
    if (used[i] && stashed.defined()) {
      dtensor_meta(stashed)->local.add_(part(i));
    }
  }
  if (needs_new && !is_direct) {
    ensure_flat_grad(params);
    flat_grad_.flat.copy_(output_);
  }
  for (size_t i = 0; i < members_.size(); ++i) {
    auto& param = params[members_[i]];
    if (param.stashed_grad().defined()) {
      param.restore_stashed_grad();
    } else if (used[i]) {
      param.set_sharded_grad(flat_grad_.grads[i]);
    }
  }
}

void GradientReduction::end() {
  output_ = at::Tensor();
  output_buffer_.give_back();
  stage_ = Stage::Idle;
}

void GradientReduction::discard() {
  if (in_flight()) {
    pending_.wait();
    input_.give_back();
    end();
  }
  partial_ = at::Tensor();
}

}  // namespace tessera
