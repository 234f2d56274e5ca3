// What a GradientReduction sends: which parameters, how they are laid out, and which of them have a gradient. Its steps
// are in gradient_reduction.cpp.

#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/error.h"
#include "fully_shard/block_copy.h"
#include "fully_shard/gradient_reduction.h"

namespace tessera {

namespace {

bool has_host_floats(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat;
}

}  // namespace

/// Frozen parameters are not sent. Which are frozen is a matter of the model, so ranks agree on it.
void GradientReduction::plan(std::span<const ShardedParam> params) {
  std::vector<bool> trainable;
  for (const auto& param : params) {
    trainable.push_back(param.requires_grad());
  }
  if (trainable == trainable_) {
    return;
  }
  TESSERA_CHECK(StateError, !has_partial(),
                "{}: requires_grad of a parameter of {} changed while gradients wait for their all-reduce; "
                "run a backward with set_requires_all_reduce(true) first",
                options_.api, params[0].origin().module);
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
  const auto dtype = params[members_.at(0)].dtype();
  grad_options_ = options_.grad_options.dtype(dtype);
  reduce_dtype_ = options_.reduce_dtype.value_or(dtype);
  const int64_t ranks = options_.axes.num_shards();
  layout_ = make_param_layout(shapes, ranks, dims);
  numel_ = layout_.shard_numel + aligned_numel(static_cast<int64_t>(members_.size()));
  copies_.clear();
  for (const auto& slot : layout_.slots) {
    copies_.push_back(layout_.copies(slot, numel_));
  }
  unused_ = layout_.unused(numel_);
  input_ = PooledBuffer(ranks * numel_, buffer_options());
  output_buffer_ = PooledBuffer(numel_, buffer_options());
  flat_grad_ = {};
  flags_ = at::Tensor();
  group_takes_parts_ =
      ranks > 1 && layout_.is_cut_on_dim_0() && takes_parts(options_.axes.shard_group(), options_.device.type());
}

bool GradientReduction::can_send_in_place() const {
  return group_takes_parts_ && scale_.before == 1 && is_default(reduce_scatter_) &&
         std::all_of(grads_.begin(), grads_.end(),
                     [&](const at::Tensor& grad) { return !grad.defined() || grad.scalar_type() == reduce_dtype_; });
}

/// Missing gradients, and the ends of uneven ones, are sent as zeros.
TensorParts GradientReduction::gradient_parts() {
  std::vector<TensorPart> parts;
  parts.reserve(grads_.size() + 1);
  const int64_t flags = numel_ - layout_.shard_numel;
  if (!flags_.defined()) {
    flags_ = at::empty({layout_.num_ranks * flags}, buffer_options());
  }
  write_flags(flags_, 0, flags);
  for (size_t i = 0; i < grads_.size(); ++i) {
    parts.push_back({layout_.slots[i].offset, layout_.slots[i].chunk_numel, std::move(grads_[i])});
  }
  parts.push_back({layout_.shard_numel, flags, flags_});
  grads_.clear();
  return std::make_shared<const std::vector<TensorPart>>(std::move(parts));
}

/// One flag a parameter for each rank, `offset` into its `stride` elements. Those of float buffers on the CPU are
/// written and read without an op of libtorch, which would cost more than the copies of a unit of small parameters. On
/// other devices nothing comes from the host, which would have to wait for the device.
void GradientReduction::write_flags(const at::Tensor& buffer, int64_t offset, int64_t stride) const {
  const int64_t flags = numel_ - layout_.shard_numel;
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

/// Which parameters got a gradient on any rank. What this rank has is known without the device's answer. A user's
/// reduction may bring gradients of ranks whose flags do not come here: then all count as used, and agree on it.
std::vector<bool> GradientReduction::used_members() const {
  if (hook_) {
    return std::vector<bool>(members_.size(), true);
  }
  if (std::ranges::find(has_grad_, false) == has_grad_.end()) {
    return has_grad_;
  }
  const SideStream::Scope scope(*stream_);
  const auto flags = output_.narrow(0, layout_.shard_numel, static_cast<int64_t>(members_.size()));
  const auto host = has_host_floats(output_) ? flags : flags.to(at::kCPU, at::kFloat);
  const auto* data = host.const_data_ptr<float>();
  std::vector<bool> used;
  used.reserve(members_.size());
  for (size_t i = 0; i < members_.size(); ++i) {
    used.push_back(data[i] > 0);
  }
  return used;
}

void GradientReduction::copy_in(const at::Tensor& buffer) {
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
  if (scale_.before != 1) {
    buffer.div_(scale_.before);
  }
}

}  // namespace tessera
