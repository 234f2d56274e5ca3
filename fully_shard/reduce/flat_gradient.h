#pragma once
// Where a unit's sharded gradients stay: views of one flat buffer, as the reduction has them in its result, one DTensor
// a parameter. They are kept from step to step, and used again once nobody else refers to them (after zero_grad()): the
// reduction can then write them where they stay.
//
//   if (flat.can_be_result(params, dtype)) reduce to flat.ensure(params);
//   flat.hand_out(result, params, used, stream);        // the parameters have their gradients
//
// A parameter that has a gradient of an earlier backward gets the sum.
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

  /// Whether a result in `dtype` can be the flat gradient itself: nothing is added to it and nothing cast.
  bool can_be_result(std::span<const ShardedParam> params, at::ScalarType dtype) const;
  /// The buffer: a new one where the last one's gradients are somebody's. Contents are undefined.
  const at::Tensor& ensure(std::span<const ShardedParam> params);
  /// The buffer is somebody else's from now on; the parameters keep gradients that they have.
  void leave_memory();
  /// Gives the parameters that are `used`, which has an item a piece, their gradients: what ensure() returned, or other
  /// `numel` elements, which are added or copied on `stream`. What the others had before backward they have again.
  void hand_out(const at::Tensor& result, std::span<ShardedParam> params, const std::vector<bool>& used,
                StreamLane& stream);

 private:
  bool is_free() const;
  bool is_all_stashed(std::span<const ShardedParam> params, const std::vector<bool>& used) const;
  bool needs_copy(const at::Tensor& result, std::span<const ShardedParam> params, const std::vector<bool>& used) const;
  at::Tensor piece_of(const at::Tensor& flat, size_t i, const ShardedParam& param) const;

  std::vector<GradientPiece> pieces_;
  int64_t numel_ = 0;
  at::TensorOptions options_;
  at::Tensor flat_;
  std::vector<at::Tensor> grads_;  // one a piece
};

}  // namespace tessera
