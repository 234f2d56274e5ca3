#pragma once
// The tensor behind a DTensor: a plain c10::TensorImpl with the *global* sizes and strides, the dispatch key
// PrivateUse1 and the real device, whose BackendMeta holds this rank's local tensor and the spec.
//
// Being an ordinary at::Tensor, it goes through stock autograd, optimizers and modules unchanged; below
// autograd every op lands in dispatch.cpp. It owns no data: data_ptr() on it throws.
//
// Thread safety: as at::Tensor; the meta is immutable, so shallow copies may share it.

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
  const std::shared_ptr<const ParameterOrigin> origin;  // null for all but fully_shard's parameters
  const MaterializedView materialized_view;
};

/// A DTensor of `spec` over `local`, without autograd history. `local` must have the spec's local sizes and
/// dtype: a mismatch is an AssertionError, since it would be a wrong number later.
at::Tensor wrap_local(at::Tensor local, SpecPtr spec, std::shared_ptr<const ParameterOrigin> origin = nullptr,
                      MaterializedView materialized_view = {});

/// The meta of a DTensor; null for any other tensor, also an undefined one.
inline const DTensorMeta* dtensor_meta(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (!impl->key_set().has_backend(c10::BackendComponent::PrivateUse1Bit)) {
    return nullptr;
  }
  return static_cast<const DTensorMeta*>(impl->get_backend_meta());
}

/// The spec of a DTensor, which lives as long as the tensor. Throws ValueError if `tensor` is not one.
const SpecPtr& dtensor_spec(const at::Tensor& tensor);

/// Whether the DTensor's local memory is its own: no view of it, no detached copy, no program that called to_local(),
/// and nothing that a backward needs refers to it.
bool has_own_local_memory(const at::Tensor& tensor);

/// Counts the tensor's version up, as an op that writes to it does. Inference tensors have none.
inline void count_write(const at::Tensor& tensor) {
  if (!tensor.is_inference()) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

/// Throws StateError if `meta` is that of a copied view and the viewed tensor was written since: on every rank, as all
/// ranks write. `where` names the reader.
void check_not_stale(const DTensorMeta& meta, const char* where);

}  // namespace tessera
