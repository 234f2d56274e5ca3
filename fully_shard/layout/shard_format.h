#pragma once
// Where the shards of a unit's parameters lie: in one flat buffer of the parameters' dtype, as param_layout says. Where
// dtypes differ, as those of frozen bfloat16 weights beside trained float32 ones, it is a buffer of bytes with one item
// a parameter (gather_format.h): what an all-gather without casts sends as it is. Behind the shards is the tag
// (all_gather.h).
//
// Thread safety: values.

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "comm/backend/tensor_segment.h"
#include "fully_shard/layout/gather_format.h"
#include "fully_shard/layout/param_layout.h"

namespace tessera {

class ShardFormat {
 public:
  /// `dtypes`: of the parameters, one for each slot of `layout`.
  ShardFormat(ParamLayout layout, const std::vector<at::ScalarType>& dtypes);

  /// Whether the parameters' dtypes differ.
  bool is_mixed() const { return bytes_.has_value(); }
  /// Of the flat buffer.
  at::ScalarType dtype() const { return is_mixed() ? at::kByte : dtype_; }
  /// Elements of the flat buffer, the tag included.
  int64_t numel() const;

  /// The place of parameter i in this rank's flat buffer: 1-D, in its own dtype, as long as a full chunk.
  at::Tensor chunk(const at::Tensor& flat, size_t i) const;
  std::vector<at::Tensor> chunks(const at::Tensor& flat) const;
  /// The same of all ranks' flat buffers, as a part of an all-gather: `full` is all of parameter i.
  TensorSegment part(size_t i, const at::Tensor& full) const;

 private:
  ParamLayout layout_;
  at::ScalarType dtype_;
  std::optional<GatherFormat> bytes_;
};

}  // namespace tessera
