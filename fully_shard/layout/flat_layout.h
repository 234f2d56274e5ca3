#pragma once
// FlatLayout: the flat buffer of a unit's shards, and the one that a rank sends. Where all are of one dtype it is laid
// out as param_layout.h says. Where dtypes differ, or an extension encodes some (all_gather_extension.h), it is a
// buffer of bytes with an item a parameter, at multiples of 16 bytes. Behind the parameters is the tag (gather_tag.h).
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

/// How one parameter lies in a flat buffer.
struct GatherItem {
  at::ScalarType dtype;  // its own there, or, with an extension, that in which it is decoded: the compute dtype
  std::shared_ptr<const AllGatherExtension> extension = nullptr;
};

class FlatLayout {
 public:
  /// Takes one item a slot. `in_bytes`: a buffer of bytes also where all items are of one dtype.
  FlatLayout(ParamLayout params, std::vector<GatherItem> items, bool in_bytes = false);

  const ParamLayout& params() const { return params_; }
  int64_t num_ranks() const { return params_.num_ranks; }
  const ParamSlot& slot(size_t i) const { return params_.slots[i]; }
  bool is_cut_on_dim_0() const { return params_.is_cut_on_dim_0(); }
  bool is_in_bytes() const { return dtype_ == at::kByte; }
  /// Dtype and elements of a rank's buffer, the tag included.
  at::ScalarType dtype() const { return dtype_; }
  int64_t numel() const { return numel_; }
  /// Returns whether the parameters' dtypes in both are equal, and no extension encodes one.
  bool has_same_dtypes(const FlatLayout& other) const;

  /// Returns parameter i, without extension, in a rank's buffer: 1-D, in its own dtype, as long as a full chunk.
  at::Tensor chunk(const at::Tensor& flat, size_t i) const;
  std::vector<at::Tensor> chunks(const at::Tensor& flat) const;
  /// Returns the same of all ranks' buffers: `full` is all of parameter i.
  TensorSegment segment(size_t i, const at::Tensor& full) const;

  /// Writes what this rank sends to `flat`, on its device: its rows of each parameter, 1-D, with zeros behind.
  void encode(const std::vector<at::Tensor>& chunks, const at::Tensor& flat) const;
  /// Copies the parameters, contiguous and full, out of all ranks' buffers.
  void decode(const at::Tensor& gathered, const std::vector<at::Tensor>& params) const;

 private:
  /// Elements of dtype_ in one of the item.
  int64_t item_size(size_t i) const;
  at::Tensor decoded_chunks(const at::Tensor& gathered, size_t i) const;

  ParamLayout params_;
  std::vector<GatherItem> items_;
  at::ScalarType dtype_;
  std::vector<FlatRange> ranges_;               // of the items, in elements of dtype_
  int64_t numel_ = 0;                           // likewise
  std::vector<std::vector<BlockCopy>> copies_;  // of each parameter, in elements of its own dtype
};

}  // namespace tessera
