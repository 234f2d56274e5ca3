#include "fully_shard/gradient_message.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "comm/collectives.h"
#include "fully_shard/block_copy.h"

namespace tessera {

namespace {

bool has_host_floats(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat;
}

}  // namespace

GradientMessage::GradientMessage(std::span<const ShardedParam> params, const Options& options) {
  std::vector<std::vector<int64_t>> shapes;
  std::vector<int64_t> dims;
  for (size_t i = 0; i < params.size(); ++i) {
    trainable_.push_back(params[i].requires_grad());
    if (trainable_[i]) {
      members_.push_back(i);
      shapes.push_back(params[i].unsharded().sizes().vec());
      dims.push_back(options.dims[i]);
    }
  }
  const int64_t ranks = options.axes.num_shards();
  layout_ = make_param_layout(shapes, ranks, dims);
  numel_ = layout_.shard_numel + aligned_numel(static_cast<int64_t>(members_.size()));
  options_ = at::TensorOptions(options.device).dtype(options.dtype.value_or(params[members_.at(0)].dtype()));
  for (const auto& slot : layout_.slots) {
    copies_.push_back(layout_.copies(slot, numel_));
  }
  unused_ = layout_.unused(numel_);
  group_takes_parts_ =
      ranks > 1 && layout_.is_cut_on_dim_0() && takes_parts(options.axes.shard_group(), options.device.type());
}

bool GradientMessage::is_of(std::span<const ShardedParam> params) const {
  const auto is_same = [](const ShardedParam& param, bool trainable) { return param.requires_grad() == trainable; };
  return std::ranges::equal(params, trainable_, is_same);
}

std::vector<GradientPiece> GradientMessage::pieces(int64_t rank) const {
  std::vector<GradientPiece> pieces;
  for (size_t i = 0; i < members_.size(); ++i) {
    const auto& slot = layout_.slots[i];
    pieces.push_back({.param = members_[i], .offset = slot.offset, .numel = slot.numel_of(rank, layout_.num_ranks)});
  }
  return pieces;
}

void GradientMessage::collect(std::span<ShardedParam> params) {
  has_grad_.clear();
  grads_.clear();  // of a collect() that threw
  for (auto i : members_) {
    auto grad = params[i].take_unsharded_grad(dtype());
    has_grad_.push_back(grad.defined());
    grads_.push_back(grad.defined() ? grad.contiguous() : at::Tensor());
  }
}

bool GradientMessage::can_be_parts() const {
  const auto is_uncast = [&](const at::Tensor& grad) { return !grad.defined() || grad.scalar_type() == dtype(); };
  return group_takes_parts_ && std::ranges::all_of(grads_, is_uncast);
}

TensorParts GradientMessage::take_parts() {
  std::vector<TensorPart> parts;
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
  return std::make_shared<const std::vector<TensorPart>>(std::move(parts));
}

void GradientMessage::copy_to(const at::Tensor& buffer) {
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

/// Those for each rank, `offset` into its `stride` elements. Flags of float buffers on the CPU are written and read
/// without an op of libtorch, which would cost more than the copies of a unit of small parameters. On other devices
/// nothing comes from the host, which would have to wait for the device.
void GradientMessage::write_flags(const at::Tensor& buffer, int64_t offset, int64_t stride) const {
  const int64_t flags = num_flags();
  const auto members = static_cast<int64_t>(members_.size());
  if (has_host_floats(buffer)) {
    auto* data = buffer.mutable_data_ptr<float>();
    for (int64_t rank = 0; rank < layout_.num_ranks; ++rank) {
      auto* flag = data + rank * stride + offset;
      std::fill(std::copy(has_grad_.begin(), has_grad_.end(), flag), flag + flags, 0.f);
    }
    return;
  }
  const auto of_flags = buffer.view({layout_.num_ranks, stride}).narrow(1, offset, flags);
  of_flags.narrow(1, 0, members).fill_(1);
  of_flags.narrow(1, members, flags - members).zero_();
  for (int64_t i = 0; i < members; ++i) {
    if (!has_grad_[i]) {
      of_flags.select(1, i).zero_();
    }
  }
}

std::vector<bool> GradientMessage::used(const at::Tensor& result) const {
  if (std::ranges::find(has_grad_, false) == has_grad_.end()) {
    return has_grad_;
  }
  const auto flags = result.narrow(0, layout_.shard_numel, static_cast<int64_t>(members_.size()));
  const auto host = has_host_floats(result) ? flags : flags.to(at::kCPU, at::kFloat);
  const auto* data = host.const_data_ptr<float>();
  std::vector<bool> used;
  used.reserve(members_.size());
  for (size_t i = 0; i < members_.size(); ++i) {
    used.push_back(data[i] > 0);
  }
  return used;
}

}  // namespace tessera
