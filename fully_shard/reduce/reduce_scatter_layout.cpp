#include "fully_shard/reduce/reduce_scatter_layout.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <functional>

#include "comm/collectives.h"
#include "fully_shard/layout/block_copy.h"

namespace tessera {

namespace {

bool has_host_floats(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat;
}

}  // namespace

ReduceScatterLayout::ReduceScatterLayout(std::span<const ShardedParam> params, const UnitContext& context) {
  std::vector<ParamSlot> slots;
  for (size_t i = 0; i < params.size(); ++i) {
    trainable_.push_back(params[i].requires_grad());
    if (trainable_[i]) {
      members_.push_back(i);
      slots.push_back(params[i].slot());
    }
  }
  const int64_t ranks = context.axes.num_shards();
  layout_ = pack_slots(std::move(slots), ranks);
  numel_ = layout_.shard_numel + gradient_flags_numel(num_params());
  options_ =
      at::TensorOptions(context.device).dtype(context.reduce_dtype.value_or(params[members_.at(0)].spec()->dtype()));
  for (const auto& slot : layout_.slots) {
    copies_.push_back(layout_.copies(slot, numel_));
  }
  unused_ = layout_.unused(numel_);
  is_read_on_host_ = context.shard_options.device().is_cpu();
  group_supports_segments_ =
      ranks > 1 && layout_.is_cut_on_dim_0() && supports_segments(context.axes.shard_group(), context.device.type());
}

bool ReduceScatterLayout::matches(std::span<const ShardedParam> params) const {
  const auto is_same = [](const ShardedParam& param, bool trainable) { return param.requires_grad() == trainable; };
  return std::ranges::equal(params, trainable_, is_same);
}

std::vector<GradientPiece> ReduceScatterLayout::pieces(int64_t rank) const {
  std::vector<GradientPiece> pieces;
  for (size_t i = 0; i < members_.size(); ++i) {
    const auto& slot = layout_.slots[i];
    pieces.push_back({.param = members_[i], .offset = slot.offset, .numel = slot.numel_on(rank, layout_.num_ranks)});
  }
  return pieces;
}

void ReduceScatterLayout::collect(std::span<ShardedParam> params) {
  has_grad_.clear();
  grads_.clear();  // left by a collect() that threw
  for (auto i : members_) {
    auto grad = params[i].take_unsharded_grad(dtype());
    has_grad_.push_back(grad.defined());
    grads_.push_back(grad.defined() ? grad.contiguous() : at::Tensor());
  }
}

bool ReduceScatterLayout::can_be_segments() const {
  const auto is_uncast = [&](const at::Tensor& grad) { return !grad.defined() || grad.scalar_type() == dtype(); };
  return group_supports_segments_ && std::ranges::all_of(grads_, is_uncast);
}

TensorSegments ReduceScatterLayout::take_segments() {
  std::vector<TensorSegment> parts;
  parts.reserve(grads_.size() + 1);
  if (!flags_.defined()) {
    flags_ = at::empty({layout_.num_ranks * num_flags()}, options_);
  }
  write_flags(flags_, 0, num_flags());
  for (size_t i = 0; i < grads_.size(); ++i) {
    parts.push_back({layout_.slots[i].offset, layout_.slots[i].chunk_numel, std::move(grads_[i])});
  }
  parts.push_back({layout_.shard_numel, num_flags(), flags_});
  grads_.clear();
  return std::make_shared<const std::vector<TensorSegment>>(std::move(parts));
}

void ReduceScatterLayout::copy_to(const at::Tensor& buffer) {
  BlockCopier copier;
  std::vector<FlatRange> missing;
  for (size_t i = 0; i < members_.size(); ++i) {
    if (grads_[i].defined()) {
      copier.to_flat(grads_[i], buffer, copies_[i]);
    } else {
      for (int64_t rank = 0; rank < layout_.num_ranks; ++rank) {
        missing.push_back({rank * numel_ + layout_.slots[i].offset, layout_.slots[i].chunk_numel});
      }
    }
  }
  copier.zero(buffer, missing);
  copier.zero(buffer, unused_);
  copier.run();
  write_flags(buffer, layout_.shard_numel, numel_);
  grads_.clear();
}

/// Writes the flags for each rank at `offset` of its `stride` elements. On a device, no data comes from the host, which
/// would have to wait.
void ReduceScatterLayout::write_flags(const at::Tensor& buffer, int64_t offset, int64_t stride) const {
  if (has_host_floats(buffer)) {
    write_host_flags(buffer, offset, stride);
    return;
  }
  const auto flags = buffer.view({layout_.num_ranks, stride}).narrow(1, offset, num_flags());
  flags.zero_();
  const auto of_gradients = flags.narrow(1, num_params(), num_params());
  of_gradients.fill_(1);
  for (size_t i = 0; i < members_.size(); ++i) {
    if (!has_grad_[i]) {
      of_gradients.select(1, static_cast<int64_t>(members_[i])).zero_();
    }
  }
  for (int64_t i = 0; i < num_params() && is_read_on_host_; ++i) {
    if (!trainable_[i]) {
      flags.select(1, i).fill_(1);
      of_gradients.select(1, i).zero_();
    }
  }
}

/// Avoids libtorch's ops, which would cost more than the copies of a unit of small parameters.
void ReduceScatterLayout::write_host_flags(const at::Tensor& buffer, int64_t offset, int64_t stride) const {
  auto* data = buffer.mutable_data_ptr<float>() + offset;
  for (int64_t rank = 0; rank < layout_.num_ranks; ++rank) {
    auto* const frozen = data + rank * stride;
    auto* const has_grad = std::transform(trainable_.begin(), trainable_.end(), frozen, std::logical_not<>());
    std::fill(has_grad, frozen + num_flags(), 0.f);
    for (size_t i = 0; i < members_.size(); ++i) {
      has_grad[members_[i]] = has_grad_[i] ? 1.f : 0.f;
    }
  }
}

const float* ReduceScatterLayout::host_flags(const at::Tensor& result, at::Tensor& host) const {
  if (has_host_floats(result)) {
    return result.const_data_ptr<float>() + layout_.shard_numel;
  }
  host = result.narrow(0, layout_.shard_numel, 2 * num_params()).to(at::kCPU, at::kFloat);
  return host.const_data_ptr<float>();
}

std::vector<bool> ReduceScatterLayout::used(const at::Tensor& result) const {
  if (std::ranges::find(has_grad_, false) == has_grad_.end()) {
    return has_grad_;
  }
  at::Tensor host;
  const auto* has_grad = host_flags(result, host) + num_params();
  std::vector<bool> used;
  used.reserve(members_.size());
  for (const auto member : members_) {
    used.push_back(has_grad[member] > 0);
  }
  return used;
}

std::optional<size_t> ReduceScatterLayout::frozen_elsewhere(const at::Tensor& result) const {
  if (!is_read_on_host_) {
    return std::nullopt;
  }
  at::Tensor host;
  const auto* frozen = host_flags(result, host);
  const auto found = std::ranges::find_if(members_, [frozen](size_t member) { return frozen[member] > 0; });
  return found == members_.end() ? std::nullopt : std::optional(*found);
}

}  // namespace tessera
