#include "dtensor/dispatch/inplace_view.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/squeeze.h>
#include <ATen/ops/t.h>
#include <ATen/ops/transpose.h>
#include <ATen/ops/unsqueeze.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/local/from_local_checks.h"
#include "dtensor/local/gather_full.h"

namespace tessera {

const at::Tensor& adopt_data(const at::Tensor& self, const at::Tensor& other) {
  const auto* meta = dtensor_meta(other);
  TESSERA_ASSERT(meta != nullptr, "a view of a DTensor is plain");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(meta->spec->sizes(), meta->spec->strides());
  impl->set_storage_offset(other.storage_offset());
  auto materialized_view = meta->materialized_view
                               ? MaterializedView::of(self, MaterializedView::Elements::Other).of_itself()
                               : MaterializedView();
  impl->set_backend_meta(
      c10::make_intrusive<DTensorMeta>(meta->local, meta->spec, meta->origin, std::move(materialized_view)));
  return self;
}

at::Tensor& adopt_data(at::Tensor& self, const at::Tensor& other) {
  adopt_data(std::as_const(self), other);
  return self;
}

namespace {

at::Tensor& t_(at::Tensor& self) {
  return adopt_data(self, self.t());
}

at::Tensor& transpose_(at::Tensor& self, int64_t dim0, int64_t dim1) {
  return adopt_data(self, self.transpose(dim0, dim1));
}

at::Tensor& unsqueeze_(at::Tensor& self, int64_t dim) {
  return adopt_data(self, self.unsqueeze(dim));
}

at::Tensor& squeeze_(at::Tensor& self) {
  return adopt_data(self, self.squeeze());
}

at::Tensor& squeeze_dim_(at::Tensor& self, int64_t dim) {
  return adopt_data(self, self.squeeze(dim));
}

at::Tensor& squeeze_dims_(at::Tensor& self, at::IntArrayRef dims) {
  return adopt_data(self, self.squeeze(dims));
}

/// Keeps shards of dims that the new sizes still have, and replicates the rest.
Placements resized_placements(const Placements& placements, int64_t ndim) {
  Placements result = placements;
  for (auto& placement : result) {
    if (!placement.is_shard() || placement.dim() >= ndim) {
      placement = Replicate();
    }
  }
  return result;
}

/// Keeps the elements in row-major order, as for a plain tensor; new elements are undefined. The elements get new
/// memory, which views would not see. (Views of a plain tensor would, whatever its new sizes.)
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
  const auto whole = gather_full(*meta);
  auto resized = at::empty(sizes, whole.options());
  const int64_t kept = std::min(whole.numel(), resized.numel());
  resized.view(-1).narrow(0, 0, kept).copy_(whole.reshape(-1).narrow(0, 0, kept));
  const auto new_spec =
      DTensorSpec::make(spec.mesh(), resized_placements(spec.placements(), static_cast<int64_t>(sizes.size())),
                        TensorMeta::contiguous(sizes, spec.dtype()));
  return adopt_data(self, wrap_local(local_shard_of(resized, *new_spec), new_spec, meta->origin));
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
  library.impl("resize_", &resize_symint_);
  library.impl("resize_as_", &resize_as_);
}

}  // namespace tessera
