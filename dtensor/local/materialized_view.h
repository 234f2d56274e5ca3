#pragma once
// Views of DTensors whose data had to be moved: x.select(0, 3) of a Shard(0), which one rank has the row of, or a
// narrow() across shards. Such a view is a copy. A write to it is carried over to the viewed tensor, where the view is
// made of slices of dims (strided_view.h); what is written to that tensor otherwise makes the view stale, which is an
// error where it is read. (PyTorch's DTensor loses the write, and reads on.)

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "dtensor/spec/dtensor_spec.h"

namespace tessera {

class MaterializedView {
 public:
  /// Whether an element of the view is one of the viewed tensor as it lies in memory; not so of conjugates, of parts of
  /// complex numbers, and where nobody knows.
  enum class Elements { Same, Other };

  /// For DTensors that are none.
  MaterializedView() = default;
  /// Of `viewed`, a DTensor, which may be a copied view itself. Memory of `viewed` is not kept by it.
  static MaterializedView of(const at::Tensor& viewed, Elements elements);

  explicit operator bool() const { return viewed_ != nullptr; }
  /// Whether the viewed tensor, or its local tensor, was written since, or one that shares a version counter with
  /// either: tensor.data() shares the local one alone. Inference tensors count no versions: never.
  bool is_stale() const;
  /// For the tensor that becomes its own copied view (as_strided_).
  MaterializedView of_itself() const;

  /// Why a write to `view`, the DTensor that this belongs to, cannot be carried over; empty if it can be. The same on
  /// every rank.
  std::string why_not_written(const at::Tensor& view) const;
  /// Copies `view`, which was written just now, to this rank's part of the viewed tensor, and counts that as a write of
  /// it. Returns what belongs to `view` from then on: the others that were made of the viewed tensor are stale.
  /// `is_counted`: whether the write of `view` was counted; else autograd does so once the op is done. Collective where
  /// `view` is not replicated. why_not_written() is empty.
  MaterializedView carry_over(const at::Tensor& view, bool is_counted) const;

 private:
  struct Viewed;
  std::shared_ptr<const Viewed> viewed_;
};

}  // namespace tessera
