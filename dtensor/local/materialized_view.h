#pragma once
// Views of DTensors that required moving data, such as x.select(0, 3) of a Shard(0), or a narrow() across shards. Such
// a view is a copy. Writes to it are copied to the viewed tensor if the view consists of slices (strided_view.h). After
// other writes to that tensor the view is stale, and reading it is an error. (PyTorch's DTensor loses the write.)

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "dtensor/spec/dtensor_spec.h"

namespace tessera {

class MaterializedView {
 public:
  /// Relation of the view's elements to the viewed tensor's memory: equal, or not (conjugates, parts of complex
  /// numbers) or unknown.
  enum class Elements { Same, Other };

  /// For DTensors that are not such views.
  MaterializedView() = default;
  /// Makes the view of `viewed`, a DTensor that may be a copied view itself. Does not keep its memory.
  static MaterializedView of(const at::Tensor& viewed, Elements elements);

  explicit operator bool() const { return viewed_ != nullptr; }
  /// Returns whether the viewed tensor was written since, or another one with its or its local tensor's version
  /// counter. tensor.data() has only the local one's. Always false for inference tensors, which have no versions.
  bool is_stale() const;
  /// Returns the meta for a tensor that becomes its own copied view (as_strided_).
  MaterializedView of_itself() const;

  /// Returns why a write to `view`, which this belongs to, cannot be copied back, or "". Equal on all ranks.
  std::string why_not_written(const at::Tensor& view) const;
  /// Copies `view`, which was just written, to this rank's shard of the viewed tensor, and counts that as a write.
  /// Returns the meta of `view` from then on; other views of the viewed tensor become stale. `is_counted`: the write of
  /// `view` was counted; otherwise autograd will do so after the op. Requires an empty why_not_written(). All ranks
  /// must call it if `view` is not replicated.
  MaterializedView carry_over(const at::Tensor& view, bool is_counted) const;

 private:
  struct Viewed;
  std::shared_ptr<const Viewed> viewed_;
};

}  // namespace tessera
