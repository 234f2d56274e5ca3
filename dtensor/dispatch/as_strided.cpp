// as_strided and similar ops: their strides and offsets refer to the full tensor's memory, of which a rank may have
// only a shard.

#include <ATen/core/Tensor.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/library.h>

#include "base/error.h"
#include "dtensor/dispatch/inplace_view.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/local/from_local_checks.h"
#include "dtensor/local/gather_full.h"
#include "dtensor/local/redistribute.h"
#include "dtensor/spec/strided_view.h"

namespace tessera {

namespace {

/// Returns whether autograd is now making the view of a copy of the gradient, in order to apply a write that forward
/// made to a view.
bool writes_part_of_gradient() {
  const auto node = torch::autograd::get_current_node();
  return dynamic_cast<const torch::autograd::CopySlices*>(node.get()) != nullptr;
}

/// Makes `self` replicated, so that every view of it shares its memory. Returns false if other tensors share its
/// current memory. Collective.
bool become_whole(const at::Tensor& self) {
  const auto* meta = dtensor_meta(self);
  const auto& spec = *meta->spec;
  const bool owns = has_own_local_memory(self) && !meta->materialized_view;
  if (!same_on_all_ranks({owns}, spec.mesh()) || !owns) {
    return false;
  }
  const auto whole = gather_full(*meta);
  auto local = at::empty_strided(spec.sizes(), spec.strides(), whole.options()).copy_(whole);
  const auto replicated = spec.with_placements(Placements(spec.placements().size(), Replicate()));
  adopt_data(self, wrap_local(std::move(local), replicated, meta->origin));
  return true;
}

/// as_strided on a DTensor: sizes, strides and offset refer to the full tensor. If they are equivalent to named views
/// (strided_view.h), as those that autograd derives from such views are, shards stay and writes reach the tensor.
/// Otherwise every rank must hold the full tensor. A gradient may be sharded where the tensor whose view was written
/// was not, and is then replicated.
at::Tensor view_strided(const at::Tensor& self, const StridedView& wanted) {
  {
    auto view = as_view_by_name(self, wanted);
    if (view && !(dtensor_meta(*view)->materialized_view && writes_part_of_gradient())) {
      return *view;
    }
  }
  if (!dtensor_meta(self)->spec->is_replicated() && writes_part_of_gradient() && become_whole(self)) {
    return view_strided(self, wanted);
  }
  const auto* meta = dtensor_meta(self);
  const auto& spec = *meta->spec;
  TESSERA_CHECK(NotImplementedError, spec.meta().is_contiguous() && wanted.offset >= 0,
                "aten::as_strided: {} is not contiguous or a view of a larger tensor, so strides say nothing of this "
                "rank's memory; "
                "use views by name (transpose, unfold, ...) or contiguous() first",
                spec.to_string());
  const Placements replicated(spec.placements().size(), Replicate());
  const auto whole = gather_full(*meta);
  auto view = at::as_strided(whole, wanted.sizes, wanted.strides, whole.storage_offset() + wanted.offset);
  auto view_spec = DTensorSpec::make(spec.mesh(), replicated, TensorMeta::of(view));
  const bool copied = !whole.is_alias_of(meta->local);
  auto result =
      wrap_local(std::move(view), std::move(view_spec), meta->origin,
                 copied || meta->materialized_view ? MaterializedView::of(self, MaterializedView::Elements::Same)
                                                   : MaterializedView());
  result.unsafeGetTensorImpl()->set_storage_offset(self.storage_offset() + wanted.offset);
  return result;
}

/// Arguments of as_strided. The offset counts from the beginning of the memory, of which `self` may be a view.
StridedView strided_view(const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                         const std::optional<c10::SymInt>& offset) {
  const auto size = C10_AS_INTARRAYREF_SLOW(sizes);
  const auto stride = C10_AS_INTARRAYREF_SLOW(strides);
  const int64_t start = offset ? offset->guard_int(__FILE__, __LINE__) - self.storage_offset() : 0;
  return {.sizes = DimVector(size.begin(), size.end()),
          .strides = DimVector(stride.begin(), stride.end()),
          .offset = start};
}

at::Tensor view_strided_symint(const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                               std::optional<c10::SymInt> offset) {
  return view_strided(self, strided_view(self, sizes, strides, offset));
}

at::Tensor as_strided_copy(const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                           std::optional<c10::SymInt> offset) {
  return view_strided_symint(self, sizes, strides, std::move(offset)).clone();
}

/// Returns a copy of `self` with `source` at the elements that as_strided would read.
at::Tensor as_strided_scatter(const at::Tensor& self, const at::Tensor& source, c10::SymIntArrayRef sizes,
                              c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  const auto* meta = dtensor_meta(self);
  TESSERA_CHECK(ValueError, meta != nullptr && dtensor_meta(source) != nullptr,
                "aten::as_strided_scatter: one of the tensors is plain; make it a DTensor with distribute_tensor");
  TESSERA_CHECK(
      NotImplementedError, meta->spec->meta().is_contiguous(),
      "aten::as_strided_scatter: {} is not contiguous, but its copy is, which has other strides; use scatters "
      "by name (select_scatter, slice_scatter, ...) or contiguous() first",
      meta->spec->to_string());
  const Placements replicated(meta->spec->placements().size(), Replicate());
  auto result = redistribute(self, replicated).clone(at::MemoryFormat::Contiguous);
  view_strided(result, strided_view(self, sizes, strides, offset)).copy_(redistribute(source, replicated));
  return result;
}

const at::Tensor& as_strided_(const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                              std::optional<c10::SymInt> offset) {
  return adopt_data(self, self.as_strided_symint(sizes, strides, std::move(offset)));
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("as_strided", &view_strided_symint);
  library.impl("as_strided_", &as_strided_);
  library.impl("as_strided_copy", &as_strided_copy);
  library.impl("as_strided_scatter", &as_strided_scatter);
}

}  // namespace tessera
