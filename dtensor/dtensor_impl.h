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
#include <string>

#include "dtensor/dtensor_spec.h"

namespace tessera {

/// Why a parameter is a DTensor: which unit sharded it. Errors name it when an op meets the parameter where
/// it should have been unsharded.
struct ParameterOrigin {
  std::string name;    // "blocks.0.wq.weight"
  std::string module;  // "blocks.0 (Block)": the unit whose hooks unshard it
};

class DTensorMeta : public c10::BackendMeta {
 public:
  DTensorMeta(at::Tensor local, SpecPtr spec, std::shared_ptr<const ParameterOrigin> origin, bool copied_view = false)
      : local(std::move(local)), spec(std::move(spec)), origin(std::move(origin)), copied_view(copied_view) {}

  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>& self) const override {
    return self;
  }

  const at::Tensor local;
  const SpecPtr spec;
  const std::shared_ptr<const ParameterOrigin> origin;  // null for all but fully_shard's parameters
  /// A view whose data had to be moved: the tensor it views would not see what is written to it.
  const bool copied_view;
};

/// A DTensor of `spec` over `local`, without autograd history. `local` must have the spec's local sizes and
/// dtype: a mismatch is an AssertionError, since it would be a wrong number later.
at::Tensor wrap_local(at::Tensor local, SpecPtr spec, std::shared_ptr<const ParameterOrigin> origin = nullptr,
                      bool copied_view = false);

/// The meta of a DTensor; null for any other tensor, also an undefined one.
inline const DTensorMeta* dtensor_meta(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (!impl->key_set().has_backend(c10::BackendComponent::PrivateUse1Bit)) {
    return nullptr;
  }
  return static_cast<const DTensorMeta*>(impl->get_backend_meta());
}

}  // namespace tessera
