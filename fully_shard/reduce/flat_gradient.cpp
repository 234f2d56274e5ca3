#include "fully_shard/reduce/flat_gradient.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "dtensor/local/dtensor_impl.h"

namespace tessera {

FlatGradient::FlatGradient(std::vector<GradientPiece> pieces, int64_t numel, const at::TensorOptions& options)
    : pieces_(std::move(pieces)), numel_(numel), options_(options) {}

/// Returns whether nothing else refers to the buffer.
bool FlatGradient::is_free() const {
  const auto is_held_here_alone = [](const at::Tensor& grad) {
    const auto meta = grad.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr();
    return grad.use_count() == 1 && meta.use_count() == 2;  // detached copies of a DTensor share its meta
  };
  return flat_.defined() && flat_.storage().use_count() == 1 + grads_.size() &&
         std::ranges::all_of(grads_, is_held_here_alone);
}

at::Tensor FlatGradient::view_piece(const at::Tensor& flat, size_t i, const ShardedParam& param) const {
  return flat.narrow(0, pieces_[i].offset, pieces_[i].numel).view(param.spec()->local_sizes());
}

bool FlatGradient::can_be_result(std::span<const ShardedParam> params, at::ScalarType dtype) const {
  return options_.dtype() == dtype && std::ranges::none_of(pieces_, [&](const GradientPiece& piece) {
           return params[piece.param].stashed_grad().defined() || params[piece.param].has_sharded_grad();
         });
}

const at::Tensor& FlatGradient::ensure(std::span<const ShardedParam> params) {
  if (is_free()) {
    return flat_;
  }
  grads_.clear();
  flat_ = at::empty({numel_}, options_);
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const auto& param = params[pieces_[i].param];
    grads_.push_back(wrap_local(view_piece(flat_, i, param), param.spec(), param.grad_origin()));
  }
  return flat_;
}

void FlatGradient::leave_memory() {
  grads_.clear();
  flat_ = at::Tensor();
}

/// Returns whether the stashed gradients cover the whole buffer, so that one addition serves all parameters.
bool FlatGradient::is_all_stashed(std::span<const ShardedParam> params, const std::vector<bool>& used) const {
  for (size_t i = 0; i < pieces_.size(); ++i) {
    if (!used[i] || grads_.empty() || !params[pieces_[i].param].stashed_grad().is_same(grads_[i])) {
      return false;
    }
  }
  return true;
}

void FlatGradient::hand_out(const at::Tensor& result, std::span<ShardedParam> params, const std::vector<bool>& used,
                            StreamLane& stream) {
  for (const auto& piece : pieces_) {
    params[piece.param].stash_sharded_grad();
  }
  if (is_all_stashed(params, used)) {
    const StreamLane::Scope scope(stream);
    flat_.add_(result);
    restore_stashed_grads(params);
    return;
  }
  std::vector<size_t> first;  // pieces of parameters without a gradient
  for (size_t i = 0; i < pieces_.size(); ++i) {
    if (used[i] && !params[pieces_[i].param].stashed_grad().defined()) {
      first.push_back(i);
    }
  }
  const bool copies = !first.empty() && !(flat_.defined() && result.is_same(flat_));
  if (copies && !is_free()) {
    ensure(params);
    stream.wait_for_current();  // which owns the memory
  }
  const StreamLane::Scope scope(stream);
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const auto& param = params[pieces_[i].param];
    if (used[i] && param.stashed_grad().defined()) {
      dtensor_meta(param.stashed_grad())->local.add_(view_piece(result, i, param));
    }
  }
  if (copies) {
    flat_.copy_(result);
  }
  for (const auto i : first) {
    params[pieces_[i].param].set_sharded_grad(grads_[i]);
  }
  restore_stashed_grads(params);
}

}  // namespace tessera
