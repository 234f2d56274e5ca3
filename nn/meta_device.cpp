#include "nn/meta_device.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>

namespace tessera {

namespace {

// A dispatch key that libtorch reserves for external programs with this purpose. It is above autograd, and therefore
// above the choice of a backend. (activation_checkpoint uses the other free key, Fake.)
constexpr auto kKey = c10::DispatchKey::DeferredInit;

bool has_tensors(const c10::FunctionSchema& schema) {
  return std::ranges::any_of(schema.arguments(), [](const c10::Argument& argument) {
    return argument.type()->str().find("Tensor") != std::string::npos;
  });
}

/// Makes a factory that is given no device create its tensor on meta.
void on_meta(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  if (schema.name() == "aten::_has_compatible_shallow_copy_type") {
    torch::jit::drop(*stack, 2);
    torch::jit::push(*stack, true);
    return;
  }
  const auto device = schema.argumentIndexWithName("device");
  if (device && !has_tensors(schema)) {
    auto& value = (*stack)[stack->size() - schema.arguments().size() + static_cast<size_t>(*device)];
    if (value.isNone()) {
      value = at::Device(at::kMeta);
    }
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_meta>());
}

MetaDeviceGuard::MetaDeviceGuard() : was_on_(c10::impl::tls_is_dispatch_key_included(kKey)) {
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

MetaDeviceGuard::~MetaDeviceGuard() {
  c10::impl::tls_set_dispatch_key_included(kKey, was_on_);
}

}  // namespace tessera
