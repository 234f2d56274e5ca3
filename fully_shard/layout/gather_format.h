#pragma once
// What a rank sends of a unit whose parameters are not all sent alike: each in a dtype of its own, or encoded by an
// extension (all_gather_extension.h). One buffer of bytes, one item a parameter, still one all-gather.
//
// Example, over 2 ranks: a weight [5, 3] in bfloat16 (chunks of 9 elements) and a bias [2] in float32 (chunks of 1):
//
//   bytes 0-17 the weight's rows | 14 unused | bytes 32-35 the bias's | 12 unused | 16 for the tag
//
// Items begin at multiples of 16 bytes. The tag (all_gather.h) is in bytes then, one a digit. Shards whose own dtypes
// differ lie in such a buffer, too (shard_format.h).

#include <optional>
#include <vector>

#include "fully_shard/layout/all_gather_extension.h"
#include "fully_shard/layout/param_layout.h"

namespace tessera {

/// How one parameter is sent.
struct GatherItem {
  at::ScalarType dtype;  // in which it is sent, or, with an extension, in which it is decoded: the compute dtype
  std::shared_ptr<const AllGatherExtension> extension = nullptr;
};

/// Of the tag behind the items. With it, a rank's bytes are a multiple of 16 too.
inline constexpr int64_t kTagBytes = 16;

class GatherFormat {
 public:
  /// `layout`: of the ranks' flat shards; one item for each of its slots.
  GatherFormat(ParamLayout layout, std::vector<GatherItem> items);

  /// Whether items differ; else the flat shards are sent as they are, or with one cast.
  static bool is_needed(const std::vector<GatherItem>& items);

  /// Of items in these dtypes, without extensions; null where it is not needed.
  static std::optional<GatherFormat> of_dtypes(const ParamLayout& layout, const std::vector<at::ScalarType>& dtypes);

  /// Of a rank's items, without the tag; a multiple of 16.
  int64_t bytes() const { return bytes_; }

  /// The bytes of item i in what one rank sends.
  FlatRange range(size_t i) const;
  /// The place of item i, without extension, in what one rank sends.
  at::Tensor item(const at::Tensor& sent, size_t i) const;
  /// Writes what this rank sends: `sent` has at least bytes() bytes. `chunks`: this rank's rows of each parameter, 1-D
  /// in its own dtype, followed by zeros where other ranks have more; on the device of `sent`.
  void encode(const std::vector<at::Tensor>& chunks, const at::Tensor& sent) const;
  /// Copies the parameters, contiguous and full, out of what all ranks sent, `rank_bytes` each, a multiple of 16.
  void decode(const at::Tensor& gathered, int64_t rank_bytes, const std::vector<at::Tensor>& params) const;

 private:
  at::Tensor decoded_chunks(const at::Tensor& gathered, int64_t rank_bytes, size_t i) const;

  ParamLayout layout_;
  std::vector<GatherItem> items_;
  std::vector<int64_t> offsets_;  // of the items, in bytes
  int64_t bytes_ = 0;
};

}  // namespace tessera
