#pragma once
// ReduceScatterLayout: what a rank sends in one reduction. The gradients of trained parameters are laid out as the flat
// shards are; behind them are two flags a parameter: whether it is frozen, and whether it has a gradient at all.
// Example, over 2 ranks, a weight [5, 3] and a bias [2] of which this rank has no gradient (param_layout.h):
//
//   to rank 0   weight's rows 0-2 (9) | 7 zeros | 0 | 7 zeros | frozen 0 0 | has one 1 0 | 4 zeros     32 elements
//   to rank 1   weight's rows 3-4 (6) | 10 zeros | 0 | 7 zeros | frozen 0 0 | has one 1 0 | 4 zeros    32 elements
//
// The sums of the second flags tell every rank which parameters some rank used: others keep an undefined gradient, and
// sizes never depend on it (compare pytorch issue 170667). Those of the first show ranks that freeze different ones.
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

/// Returns the elements behind the gradients, for so many parameters, frozen ones included.
inline int64_t gradient_flags_numel(int64_t num_params) {
  return aligned_numel(2 * num_params);
}

class ReduceScatterLayout {
 public:
  ReduceScatterLayout() = default;
  /// Lays out those of `params` that require a gradient now: one or more, of one dtype.
  ReduceScatterLayout(std::span<const ShardedParam> params, const UnitContext& context);

  /// Returns whether the same ones of `params` require a gradient.
  bool matches(std::span<const ShardedParam> params) const;
  /// Returns the places of this rank's gradients in the result.
  std::vector<GradientPiece> pieces(int64_t rank) const;

  /// Elements for one rank, and those before the flags.
  int64_t numel() const { return numel_; }
  int64_t gradients_numel() const { return layout_.shard_numel; }
  const at::TensorOptions& options() const { return options_; }
  at::ScalarType dtype() const { return c10::typeMetaToScalarType(options_.dtype()); }

  /// Takes the parameters' unsharded gradients. Collective with tensor parallelism.
  void collect(std::span<ShardedParam> params);
  /// Returns whether they can be sent from where they are: the group takes segments, and nothing is cast.
  bool can_be_segments() const;
  /// Returns what was collected, to be sent from where it is, with zeros for what is missing.
  TensorSegments take_segments();
  /// Copies what was collected to `buffer`, numel() elements for each rank.
  void copy_to(const at::Tensor& buffer);
  void clear() { grads_.clear(); }
  /// Leaves the memory of take_segments() to a collective that failed.
  void leave_memory() { flags_ = at::Tensor(); }

  /// Returns which of the sent parameters got a gradient on any rank. `result` is what this rank received.
  std::vector<bool> used(const at::Tensor& result) const;
  /// Returns the index of a parameter that is sent and that another rank has frozen, if the result is on the host.
  std::optional<size_t> frozen_elsewhere(const at::Tensor& result) const;
  size_t size() const { return members_.size(); }

 private:
  int64_t num_params() const { return static_cast<int64_t>(trainable_.size()); }
  int64_t num_flags() const { return numel_ - layout_.shard_numel; }
  void write_flags(const at::Tensor& buffer, int64_t offset, int64_t stride) const;
  void write_host_flags(const at::Tensor& buffer, int64_t offset, int64_t stride) const;
  const float* host_flags(const at::Tensor& result, at::Tensor& host) const;

  std::vector<bool> trainable_;  // of all parameters
  std::vector<size_t> members_;  // the places of those that are sent
  ParamLayout layout_;
  int64_t numel_ = 0;
  at::TensorOptions options_;
  std::vector<std::vector<BlockCopy>> copies_;
  std::vector<FlatRange> unused_;
  bool is_read_on_host_ = true;           // the result: then the flags of frozen parameters are of use
  bool group_supports_segments_ = false;  // and the gradients lie as parts do
  std::vector<at::Tensor> grads_;         // of the members, collected
  std::vector<bool> has_grad_;            // which members had one on this rank
  at::Tensor flags_;                      // for all ranks, where gradients are sent in place
};

}  // namespace tessera
