#pragma once
// FlatLayout: layout of the flat buffer of a unit's shards, and of the buffer that a rank sends. If all dtypes are
// equal, it is the layout of param_layout.h. If dtypes differ, or an extension encodes some parameters
// (all_gather_extension.h), it is a byte buffer with one item per parameter, aligned to 16 bytes. The tag
// (gather_tag.h) follows the parameters.
//
// Example, over 2 ranks: a weight [5, 3] in bfloat16 (chunks of 9 elements) and a bias [2] in float32 (chunks of 1):
//
//   bytes 0-17 the weight's rows | 14 unused | bytes 32-35 the bias's | 12 unused | 16 for the tag

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "comm/backend/tensor_segment.h"
#include "fully_shard/layout/all_gather_extension.h"
#include "fully_shard/layout/param_layout.h"

namespace tessera {

/// Format of one parameter in a flat buffer.
struct GatherItem {
  at::ScalarType dtype;  // dtype in the buffer; with an extension, the compute dtype that it decodes to
  std::shared_ptr<const AllGatherExtension> extension = nullptr;
};

class FlatLayout {
 public:
  /// Makes a layout with one item per slot. `in_bytes` requests a byte buffer even if all dtypes are equal.
  FlatLayout(ParamLayout params, std::vector<GatherItem> items, bool in_bytes = false);

  const ParamLayout& params() const { return params_; }
  int64_t num_ranks() const { return params_.num_ranks; }
  const ParamSlot& slot(size_t i) const { return params_.slots[i]; }
  bool is_cut_on_dim_0() const { return params_.is_cut_on_dim_0(); }
  bool is_in_bytes() const { return dtype_ == at::kByte; }
  /// Dtype and number of elements of a rank's buffer, including the tag.
  at::ScalarType dtype() const { return dtype_; }
  int64_t numel() const { return numel_; }
  /// Returns whether the parameters' dtypes are equal in both layouts, and no extension encodes one.
  bool has_same_dtypes(const FlatLayout& other) const;

  /// Returns parameter i, without extension, in a rank's buffer: 1-D, in its own dtype, with the length of a full
  /// chunk.
  at::Tensor chunk(const at::Tensor& flat, size_t i) const;
  std::vector<at::Tensor> chunks(const at::Tensor& flat) const;
  /// Returns the same for all ranks' buffers. `full` is the whole parameter i.
  TensorSegment segment(size_t i, const at::Tensor& full) const;

  /// Writes the data that this rank sends to `flat`, on its device. `chunks` are its rows of each parameter, 1-D and
  /// padded with zeros.
  void encode(const std::vector<at::Tensor>& chunks, const at::Tensor& flat) const;
  /// Copies the full, contiguous parameters out of all ranks' buffers.
  void decode(const at::Tensor& gathered, const std::vector<at::Tensor>& params) const;

 private:
  /// Returns the number of elements of dtype_ per element of the item.
  int64_t item_size(size_t i) const;
  at::Tensor decoded_chunks(const at::Tensor& gathered, size_t i) const;

  ParamLayout params_;
  std::vector<GatherItem> items_;
  at::ScalarType dtype_;
  std::vector<FlatRange> ranges_;               // per item, in elements of dtype_
  int64_t numel_ = 0;                           // likewise
  std::vector<std::vector<BlockCopy>> copies_;  // per parameter, in elements of its own dtype
};

}  // namespace tessera
