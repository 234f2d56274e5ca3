#pragma once
// Implementation of DTensors: a plain c10::TensorImpl with *global* sizes and strides, the dispatch key PrivateUse1 and
// the real device. Its BackendMeta has this rank's local tensor and the spec.
//
// It passes through autograd, optimizers and modules like any at::Tensor; below autograd every op reaches dispatch.cpp.
// It owns no data, so data_ptr() throws.
// Thread safety: like at::Tensor; shallow copies share the immutable meta.

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <memory>

#include "dtensor/local/materialized_view.h"
#include "dtensor/local/parameter_origin.h"
#include "dtensor/spec/dtensor_spec.h"

namespace tessera {

class DTensorMeta : public c10::BackendMeta {
 public:
  DTensorMeta(at::Tensor local, SpecPtr spec, std::shared_ptr<const ParameterOrigin> origin,
              MaterializedView materialized_view = {})
      : local(std::move(local)),
        spec(std::move(spec)),
        origin(std::move(origin)),
        materialized_view(std::move(materialized_view)) {}

  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>& self) const override {
    return self;
  }

  const at::Tensor local;
  const SpecPtr spec;
  const std::shared_ptr<const ParameterOrigin> origin;  // null except for parameters of fully_shard
  const MaterializedView materialized_view;
};

/// Makes a DTensor of `spec` over `local`, without autograd history. Throws AssertionError unless `local` has the
/// spec's local sizes and dtype.
at::Tensor wrap_local(at::Tensor local, SpecPtr spec, std::shared_ptr<const ParameterOrigin> origin = nullptr,
                      MaterializedView materialized_view = {});

/// Returns the meta of a DTensor; null for other tensors, including undefined ones.
inline const DTensorMeta* dtensor_meta(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (!impl->key_set().has_backend(c10::BackendComponent::PrivateUse1Bit)) {
    return nullptr;
  }
  return static_cast<const DTensorMeta*>(impl->get_backend_meta());
}

/// Returns the spec of a DTensor, which lives as long as the tensor. Throws ValueError for other tensors.
const SpecPtr& dtensor_spec(const at::Tensor& tensor);

/// Returns whether this DTensor alone uses its local memory. No view, detached copy, result of to_local() or saved
/// variable of a backward may refer to it.
bool has_own_local_memory(const at::Tensor& tensor);

/// Increments the tensor's version, like an op that writes it. Inference tensors have no version.
inline void count_write(const at::Tensor& tensor) {
  if (!tensor.is_inference()) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

/// Throws StateError, on every rank, if `meta` is a copied view and the viewed tensor was written since. `where` names
/// the reader.
void check_not_stale(const DTensorMeta& meta, const char* where);

}  // namespace tessera
