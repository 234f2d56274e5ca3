#pragma once
// ReduceScatterLayout: the data that a rank sends in one reduction. Gradients of trained parameters have the layout of
// flat shards. Two flags per parameter follow: whether it is frozen, and whether it has a gradient. Example, over 2
// ranks, a weight [5, 3] and a bias [2] without a gradient on this rank (param_layout.h):
//
//   to rank 0   weight's rows 0-2 (9) | 7 zeros | 0 | 7 zeros | frozen 0 0 | has one 1 0 | 4 zeros     32 elements
//   to rank 1   weight's rows 3-4 (6) | 10 zeros | 0 | 7 zeros | frozen 0 0 | has one 1 0 | 4 zeros    32 elements
//
// The sums of the second flags tell every rank which parameters any rank used; the others keep an undefined gradient.
// Sizes do not depend on this (compare pytorch issue 170667). The sums of the first flags reveal ranks that freeze
// different parameters.
//
// Thread safety: for the thread that runs the rank's backward.

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <vector>

#include "comm/backend/tensor_segment.h"
#include "fully_shard/layout/param_layout.h"
#include "fully_shard/layout/unit_context.h"
#include "fully_shard/param/sharded_param.h"
#include "fully_shard/reduce/flat_gradient.h"

namespace tessera {

/// Returns the number of elements after the gradients, for `num_params` parameters including frozen ones.
inline int64_t gradient_flags_numel(int64_t num_params) {
  return aligned_numel(2 * num_params);
}

class ReduceScatterLayout {
 public:
  ReduceScatterLayout() = default;
  /// Lays out the parameters that require a gradient now: at least one, all of one dtype.
  ReduceScatterLayout(std::span<const ShardedParam> params, const UnitContext& context);

  /// Returns whether the same parameters still require a gradient.
  bool matches(std::span<const ShardedParam> params) const;
  /// Returns the positions of this rank's gradients in the result.
  std::vector<GradientPiece> pieces(int64_t rank) const;

  /// Returns the number of elements for one rank, and the number before the flags.
  int64_t numel() const { return numel_; }
  int64_t gradients_numel() const { return layout_.shard_numel; }
  const at::TensorOptions& options() const { return options_; }
  at::ScalarType dtype() const { return c10::typeMetaToScalarType(options_.dtype()); }

  /// Takes the parameters' unsharded gradients. Collective with tensor parallelism.
  void collect(std::span<ShardedParam> params);
  /// Returns whether the gradients can be sent in place: the group supports segments, and no cast is needed.
  bool can_be_segments() const;
  /// Returns the collected gradients, to be sent in place, with zeros for missing ones.
  TensorSegments take_segments();
  /// Copies the collected gradients to `buffer`, which has numel() elements per rank.
  void copy_to(const at::Tensor& buffer);
  void clear() { grads_.clear(); }
  /// Abandons the memory of take_segments() to a failed collective.
  void leave_memory() { flags_ = at::Tensor(); }

  /// Returns which of the sent parameters had a gradient on any rank, from the `result` that this rank received.
  std::vector<bool> used(const at::Tensor& result) const;
  /// Returns the index of a sent parameter that another rank froze, if the result is on the host.
  std::optional<size_t> frozen_elsewhere(const at::Tensor& result) const;
  size_t size() const { return members_.size(); }

 private:
  int64_t num_params() const { return static_cast<int64_t>(trainable_.size()); }
  int64_t num_flags() const { return numel_ - layout_.shard_numel; }
  void write_flags(const at::Tensor& buffer, int64_t offset, int64_t stride) const;
  void write_host_flags(const at::Tensor& buffer, int64_t offset, int64_t stride) const;
  const float* host_flags(const at::Tensor& result, at::Tensor& host) const;

  std::vector<bool> trainable_;  // for all parameters
  std::vector<size_t> members_;  // indices of the sent parameters
  ParamLayout layout_;
  int64_t numel_ = 0;
  at::TensorOptions options_;
  std::vector<std::vector<BlockCopy>> copies_;
  std::vector<FlatRange> unused_;
  bool is_read_on_host_ = true;  // whether the host reads the result, as the flags of frozen parameters require
  bool group_supports_segments_ = false;  // and gradients are laid out as segments
  std::vector<at::Tensor> grads_;         // collected gradients of the members
  std::vector<bool> has_grad_;            // which members had one on this rank
  at::Tensor flags_;                      // for all ranks, if gradients are sent in place
};

}  // namespace tessera
