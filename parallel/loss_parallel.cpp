#include "parallel/loss_parallel.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <utility>

#include "dtensor/dtensor.h"

namespace tessera {

namespace {

thread_local int scopes = 0;

// Arguments of each op below: (self, target, weight=None, ...).
constexpr size_t kLogits = 0;
constexpr size_t kTarget = 1;
constexpr size_t kWeight = 2;

/// Runs above autograd, which therefore sees only DTensors, so that backward needs no scope.
void replicate_implicitly(c10::IValue& value, const DeviceMesh& mesh) {
  const auto tensor = value.isTensor() ? value.toTensor() : at::Tensor();
  if (tensor.defined() && !is_dtensor(tensor) && tensor.dim() > 0) {
    value = from_local(tensor, mesh, Placements(static_cast<size_t>(mesh.ndim()), Replicate()));
  }
}

/// Runs the op as libtorch composes it, on DTensors.
void loss(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto* const arguments = &*(stack->end() - std::ssize(op.schema().arguments()));
  const auto logits = arguments[kLogits].toTensor();
  if (scopes > 0 && is_dtensor(logits)) {
    replicate_implicitly(arguments[kTarget], device_mesh(logits));
    replicate_implicitly(arguments[kWeight], device_mesh(logits));
  }
  op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
}

void override_losses(torch::Library& library) {
  for (const char* op : {"cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d"}) {
    library.impl(op, torch::CppFunction::makeFromBoxedFunction<&loss>());
  }
}

}  // namespace

LossParallel::LossParallel() {
  ++scopes;
}

LossParallel::~LossParallel() {
  --scopes;
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  override_losses(library);
}

// In inference mode, autograd's keys are off.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  override_losses(library);
}

}  // namespace tessera
