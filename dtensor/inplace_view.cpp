// In-place ops that change a tensor's sizes: t_, squeeze_, resize_ and their kin. Each computes the new tensor and then
// lets the written one take on its sizes and content, so whoever holds the tensor sees the change.

#include <ATen/core/Tensor.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/squeeze.h>
#include <ATen/ops/t.h>
#include <ATen/ops/transpose.h>
#include <ATen/ops/unsqueeze.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/library.h>

#include "base/error.h"
#include "dtensor/dtensor_impl.h"
#include "dtensor/from_local_checks.h"
#include "dtensor/redistribute.h"
#include "dtensor/strided_view.h"
#include "dtensor/whole_tensor.h"

namespace tessera {

namespace {

/// `self` becomes what `other` is; detached copies of `self` that share its data keep their own sizes.
template <class Self>
Self& take_on(Self& self, const at::Tensor& other) {
  const auto* meta = dtensor_meta(other);
  TESSERA_ASSERT(meta != nullptr, "a view of a DTensor is plain");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(meta->spec->sizes(), meta->spec->strides());
  impl->set_storage_offset(other.storage_offset());
  auto copied_view = meta->copied_view ? CopiedView::of(self).of_itself() : CopiedView();
  impl->set_backend_meta(
      c10::make_intrusive<DTensorMeta>(meta->local, meta->spec, meta->origin, std::move(copied_view)));
  return self;
}

at::Tensor& t_(at::Tensor& self) {
  return take_on(self, self.t());
}

at::Tensor& transpose_(at::Tensor& self, int64_t dim0, int64_t dim1) {
  return take_on(self, self.transpose(dim0, dim1));
}

at::Tensor& unsqueeze_(at::Tensor& self, int64_t dim) {
  return take_on(self, self.unsqueeze(dim));
}

at::Tensor& squeeze_(at::Tensor& self) {
  return take_on(self, self.squeeze());
}

at::Tensor& squeeze_dim_(at::Tensor& self, int64_t dim) {
  return take_on(self, self.squeeze(dim));
}

at::Tensor& squeeze_dims_(at::Tensor& self, at::IntArrayRef dims) {
  return take_on(self, self.squeeze(dims));
}

const at::Tensor& as_strided_(const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                              std::optional<c10::SymInt> offset) {
  return take_on(self, self.as_strided_symint(sizes, strides, std::move(offset)));
}

/// Whether autograd takes the view now of the gradient's own copy, to write to it what a write to a view in forward
/// makes of that part.
bool writes_part_of_gradient() {
  const auto node = torch::autograd::get_current_node();
  return dynamic_cast<const torch::autograd::CopySlices*>(node.get()) != nullptr;
}

/// `self` takes on the whole tensor, so that every view of it shares its memory; false if other tensors have the memory
/// that it gives up. Collective.
bool become_whole(const at::Tensor& self) {
  const auto* meta = dtensor_meta(self);
  const auto& spec = *meta->spec;
  const bool owns = has_own_local_memory(self) && !meta->copied_view;
  if (!same_on_all_ranks({owns}, spec.mesh()) || !owns) {
    return false;
  }
  const auto whole = whole_tensor(*meta);
  auto local = at::empty_strided(spec.sizes(), spec.strides(), whole.options()).copy_(whole);
  const auto replicated = spec.with_placements(Placements(spec.placements().size(), Replicate()));
  take_on(self, wrap_local(std::move(local), replicated, meta->origin));
  return true;
}

/// as_strided on a DTensor: sizes, strides and offset refer to the whole tensor. Where they say what views by name say
/// too (strided_view.h), as those that autograd derives from such views do, shards stay and writes reach the tensor.
/// Else every rank must hold the whole tensor. A gradient may be cut where the tensor that a view was written of was
/// not: it becomes whole.
at::Tensor view_strided(const at::Tensor& self, const StridedView& wanted) {
  {
    auto view = as_view_by_name(self, wanted);
    if (view && !(dtensor_meta(*view)->copied_view && writes_part_of_gradient())) {
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
  const auto whole = whole_tensor(*meta);
  auto view = at::as_strided(whole, wanted.sizes, wanted.strides, whole.storage_offset() + wanted.offset);
  auto view_spec = DTensorSpec::make(spec.mesh(), replicated, TensorMeta::of(view));
  const bool copied = !whole.is_alias_of(meta->local);
  auto result = wrap_local(std::move(view), std::move(view_spec), meta->origin,
                           copied || meta->copied_view ? CopiedView::of(self) : CopiedView());
  result.unsafeGetTensorImpl()->set_storage_offset(self.storage_offset() + wanted.offset);
  return result;
}

/// as_strided's arguments, whose offset counts from the beginning of the memory that `self` may be a view of.
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

/// A copy of `self` with `source` where as_strided would read.
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

/// Shards of dims that the new sizes still have stay; the rest is replicated.
Placements resized_placements(const Placements& placements, int64_t ndim) {
  Placements result = placements;
  for (auto& placement : result) {
    if (!placement.is_shard() || placement.dim() >= ndim) {
      placement = Replicate();
    }
  }
  return result;
}

/// The elements keep their row-major order, as a plain tensor's do; new ones are undefined. They get new memory, which
/// views would not see, though those of a plain tensor do, whatever its new sizes.
const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  const auto* meta = dtensor_meta(self);
  if (self.sizes() == sizes) {
    return self;
  }
  TESSERA_CHECK(NotImplementedError, !format || *format == at::MemoryFormat::Contiguous,
                "aten::resize_: a DTensor takes the contiguous memory format only; call contiguous() afterwards");
  const auto& spec = *meta->spec;
  TESSERA_CHECK(NotImplementedError, spec.meta().is_contiguous(),
                "aten::resize_: {} is not contiguous, so what it keeps is up to its memory; clone() it first",
                spec.to_string());
  const bool owns = has_own_local_memory(self);
  TESSERA_CHECK(NotImplementedError, self.numel() == 0 || (same_on_all_ranks({owns}, spec.mesh()) && owns),
                "aten::resize_: {} changes its sizes, and other tensors have its memory too, such as views of it: of a "
                "DTensor they would not see what is written to it from then on. clone() it first",
                spec.to_string());
  const auto whole = whole_tensor(*meta);
  auto resized = at::empty(sizes, whole.options());
  const int64_t kept = std::min(whole.numel(), resized.numel());
  resized.view(-1).narrow(0, 0, kept).copy_(whole.reshape(-1).narrow(0, 0, kept));
  const auto new_spec =
      DTensorSpec::make(spec.mesh(), resized_placements(spec.placements(), static_cast<int64_t>(sizes.size())),
                        TensorMeta::contiguous(sizes, spec.dtype()));
  return take_on(self, wrap_local(part_of_whole(resized, *new_spec), new_spec, meta->origin));
}

const at::Tensor& resize_symint_(const at::Tensor& self, c10::SymIntArrayRef sizes,
                                 std::optional<at::MemoryFormat> format) {
  return resize_(self, C10_AS_INTARRAYREF_SLOW(sizes), format);
}

const at::Tensor& resize_as_(const at::Tensor& self, const at::Tensor& other, std::optional<at::MemoryFormat> format) {
  return resize_(self, other.sizes(), format);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("t_", &t_);
  library.impl("transpose_", &transpose_);
  library.impl("unsqueeze_", &unsqueeze_);
  library.impl("squeeze_", &squeeze_);
  library.impl("squeeze_.dim", &squeeze_dim_);
  library.impl("squeeze_.dims", &squeeze_dims_);
  library.impl("as_strided", &view_strided_symint);
  library.impl("as_strided_", &as_strided_);
  library.impl("as_strided_copy", &as_strided_copy);
  library.impl("as_strided_scatter", &as_strided_scatter);
  library.impl("resize_", &resize_symint_);
  library.impl("resize_as_", &resize_as_);
}

}  // namespace tessera
