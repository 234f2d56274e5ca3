#pragma once
// What a rank sends in one reduction of gradients: the gradients of the parameters that are trained, laid out as the
// flat shards are, and behind them one flag a parameter, whether it has a gradient at all. Example, over 2 ranks, a
// weight [5, 3] and a bias [2] of which this rank has no gradient (param_layout.h):
//
//   to rank 0   weight's rows 0-2 (9) | 7 zeros | 0 | 7 zeros | flags 1 0 | 6 zeros      32 elements
//   to rank 1   weight's rows 3-4 (6) | 10 zeros | 0 | 7 zeros | flags 1 0 | 6 zeros     32 elements
//
// The sum of the flags tells every rank which parameters some rank used. So one that only some ranks used gets the
// average with zeros for the others, and one that none used keeps an undefined gradient (the optimizer then leaves it
// alone, as in one process). The size never depends on what was used, so ranks that use different parameters cannot
// disagree on it (compare pytorch issue 170667).
//
// Thread safety: for the thread that runs the rank's backward.

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <vector>

#include "comm/tensor_part.h"
#include "fully_shard/data_parallel_axes.h"
#include "fully_shard/flat_gradient.h"
#include "fully_shard/param_layout.h"
#include "fully_shard/sharded_param.h"

namespace tessera {

class GradientMessage {
 public:
  struct Options {
    DataParallelAxes axes;
    std::optional<at::ScalarType> dtype;  // in which gradients are reduced; none: that of the parameters
    at::Device device;                    // of the unsharded parameters
    std::vector<int64_t> dims;            // that are sharded, one a parameter
  };

  GradientMessage() = default;
  /// Of those of `params` that require a gradient now, which have one dtype; there is at least one. Frozen parameters
  /// are not sent. Which are frozen is a matter of the model, so ranks agree on it.
  GradientMessage(std::span<const ShardedParam> params, const Options& options);

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
  bool can_be_parts() const;
  /// What was collected, to be sent from where it is. Missing gradients, and the ends of uneven ones, are sent as
  /// zeros.
  TensorParts take_parts();
  /// What was collected, copied to `buffer`, numel() elements for each rank.
  void copy_to(const at::Tensor& buffer);
  /// Drops what was collected.
  void clear() { grads_.clear(); }

  /// Which parameters got a gradient on any rank: for each of those that are sent. `result` is what this rank received.
  /// What this rank has is known without the device's answer.
  std::vector<bool> used(const at::Tensor& result) const;
  /// How many are sent.
  size_t size() const { return members_.size(); }

 private:
  int64_t num_flags() const { return numel_ - layout_.shard_numel; }
  void write_flags(const at::Tensor& buffer, int64_t offset, int64_t stride) const;

  std::vector<bool> trainable_;  // of all parameters
  std::vector<size_t> members_;  // the places of those that are sent
  ParamLayout layout_;
  int64_t numel_ = 0;
  at::TensorOptions options_;
  std::vector<std::vector<BlockCopy>> copies_;
  std::vector<FlatRange> unused_;
  bool group_takes_parts_ = false;  // and the gradients lie as parts do
  std::vector<at::Tensor> grads_;   // of the members, collected
  std::vector<bool> has_grad_;      // which members had one on this rank
  at::Tensor flags_;                // for all ranks, where gradients are sent in place
};

}  // namespace tessera
