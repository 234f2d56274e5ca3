#pragma once
// What a rank sends in one reduction of gradients: the gradients of the parameters that are trained, laid out as the
// flat shards are, and behind them two flags a parameter: whether it is frozen, and whether it has a gradient at all.
// Example, over 2 ranks, a weight [5, 3] and a bias [2] of which this rank has no gradient (param_layout.h):
//
//   to rank 0   weight's rows 0-2 (9) | 7 zeros | 0 | 7 zeros | frozen 0 0 | has one 1 0 | 4 zeros     32 elements
//   to rank 1   weight's rows 3-4 (6) | 10 zeros | 0 | 7 zeros | frozen 0 0 | has one 1 0 | 4 zeros    32 elements
//
// The sums of the second tell every rank which parameters some rank used. So one that only some ranks used gets the
// average with zeros for the others, and one that none used keeps an undefined gradient (the optimizer then leaves it
// alone, as in one process). The size never depends on what was used, so ranks that use different parameters cannot
// disagree on it (compare pytorch issue 170667).
//
// Which are frozen is a matter of the model, so ranks should agree on it. Where they freeze different ones and send as
// much all the same, each of them trains one that another has frozen, which the sums of the first flags show.
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

/// Elements behind the gradients, for so many parameters, frozen ones included.
inline int64_t gradient_flags_numel(int64_t num_params) {
  return aligned_numel(2 * num_params);
}

class ReduceScatterLayout {
 public:
  ReduceScatterLayout() = default;
  /// Of those of `params` that require a gradient now, which have one dtype; there is at least one. Of frozen
  /// parameters the flags alone are sent.
  ReduceScatterLayout(std::span<const ShardedParam> params, const UnitContext& context);

  /// Whether the same ones of `params` require a gradient.
  bool is_of(std::span<const ShardedParam> params) const;
  /// Where this rank's gradients lie in the result.
  std::vector<GradientPiece> pieces(int64_t rank) const;

  /// Elements that go to one rank, and how many of them come before the flags.
  int64_t numel() const { return numel_; }
  int64_t gradients_numel() const { return layout_.shard_numel; }
  /// Of the elements, and where they are.
  const at::TensorOptions& options() const { return options_; }
  at::ScalarType dtype() const { return c10::typeMetaToScalarType(options_.dtype()); }

  /// Takes the parameters' unsharded gradients. Collective where tensor parallelism cuts them.
  void collect(std::span<ShardedParam> params);
  /// Whether they can be sent from where they are: the group takes parts, and nothing is cast.
  bool can_be_segments() const;
  /// What was collected, to be sent from where it is. Missing gradients, and the ends of uneven ones, are sent as
  /// zeros.
  TensorSegments take_segments();
  /// What was collected, copied to `buffer`, numel() elements for each rank.
  void copy_to(const at::Tensor& buffer);
  /// Drops what was collected.
  void clear() { grads_.clear(); }
  /// The memory that take_segments() sends from, beside the gradients, is that of the collective from now on.
  void leave_memory() { flags_ = at::Tensor(); }

  /// Which parameters got a gradient on any rank: for each of those that are sent. `result` is what this rank received.
  /// What this rank has is known without the device's answer.
  std::vector<bool> used(const at::Tensor& result) const;
  /// The place among all parameters of one that is sent and that another rank has frozen. Known where the result is on
  /// the host: elsewhere it would have to wait for the answer.
  std::optional<size_t> frozen_elsewhere(const at::Tensor& result) const;
  /// How many are sent.
  size_t size() const { return members_.size(); }

 private:
  int64_t num_params() const { return static_cast<int64_t>(trainable_.size()); }
  int64_t num_flags() const { return numel_ - layout_.shard_numel; }
  void write_flags(const at::Tensor& buffer, int64_t offset, int64_t stride) const;
  void write_host_flags(const at::Tensor& buffer, int64_t offset, int64_t stride) const;
  /// The flags of a result on the CPU, as floats; `host` keeps them where they were converted.
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
