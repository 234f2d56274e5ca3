#pragma once
// FlatGradient: one buffer of a unit's sharded gradients, whose views are the parameters' DTensor gradients. It is used
// again once nothing else refers to them (after zero_grad()), and is then itself the result of the reduction:
//
//   if (flat.can_be_result(params, dtype)) reduce to flat.ensure(params);
//   flat.hand_out(result, params, used, stream);        // the parameters have their gradients, or the sum
//
// Thread safety: for the thread that runs the rank's backward.

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "fully_shard/memory/stream_lane.h"
#include "fully_shard/param/sharded_param.h"

namespace tessera {

/// This rank's rows of one parameter's gradient.
struct GradientPiece {
  size_t param = 0;  // its place among the parameters
  int64_t offset = 0, numel = 0;
  bool operator==(const GradientPiece&) const = default;
};

class FlatGradient {
 public:
  FlatGradient() = default;
  /// `options`: of the gradients, whose dtype is the parameters'.
  FlatGradient(std::vector<GradientPiece> pieces, int64_t numel, const at::TensorOptions& options);

  /// Returns whether a result in `dtype` can be the flat gradient: nothing is added to it and nothing cast.
  bool can_be_result(std::span<const ShardedParam> params, at::ScalarType dtype) const;
  /// Returns the buffer, a new one where others have gradients of the last. Contents are undefined.
  const at::Tensor& ensure(std::span<const ShardedParam> params);
  /// Leaves the buffer to a collective that failed; the parameters keep their gradients.
  void leave_memory();
  /// Gives the parameters that are `used` their gradients: what ensure() returned, or other elements, which are added
  /// or copied on `stream`. Others get what they had before backward.
  void hand_out(const at::Tensor& result, std::span<ShardedParam> params, const std::vector<bool>& used,
                StreamLane& stream);

 private:
  bool is_free() const;
  bool is_all_stashed(std::span<const ShardedParam> params, const std::vector<bool>& used) const;
  at::Tensor view_piece(const at::Tensor& flat, size_t i, const ShardedParam& param) const;

  std::vector<GradientPiece> pieces_;
  int64_t numel_ = 0;
  at::TensorOptions options_;
  at::Tensor flat_;
  std::vector<at::Tensor> grads_;  // one a piece
};

}  // namespace tessera
