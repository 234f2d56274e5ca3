#pragma once
// FlatGradient: a buffer of a unit's sharded gradients; its views are the parameters' DTensor gradients. It is reused
// once nothing else refers to them (after zero_grad()), and the reduction then writes to it directly:
//
//   if (flat.can_be_result(params, dtype)) reduce to flat.ensure(params);
//   flat.hand_out(result, params, used, stream);        // sets the parameters' gradients, or adds to them
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
  size_t param = 0;  // index of the parameter
  int64_t offset = 0, numel = 0;
  bool operator==(const GradientPiece&) const = default;
};

class FlatGradient {
 public:
  FlatGradient() = default;
  /// `options` are those of the gradients, with the dtype of the parameters.
  FlatGradient(std::vector<GradientPiece> pieces, int64_t numel, const at::TensorOptions& options);

  /// Returns whether a result in `dtype` can be written to the flat gradient: no addition or cast is needed.
  bool can_be_result(std::span<const ShardedParam> params, at::ScalarType dtype) const;
  /// Returns the buffer, or a new one if gradients of the last one are still in use. Contents are undefined.
  const at::Tensor& ensure(std::span<const ShardedParam> params);
  /// Abandons the buffer to a failed collective. Parameters keep their gradients.
  void leave_memory();
  /// Sets the gradients of `used` parameters from `result`: either the tensor of ensure(), or elements to add or copy
  /// on `stream`. Other parameters get their gradients from before backward.
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
  std::vector<at::Tensor> grads_;  // one per piece
};

}  // namespace tessera
