// Gradients of split, chunk and unbind join the gradients of all parts. Autograd makes plain zeros for parts that were
// not used, and cat and stack would meet them beside DTensors. Every rank makes the same ones, so during a backward
// they count as replicated.

#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include "dtensor/dispatch.h"
#include "dtensor/dtensor_impl.h"

namespace tessera {

namespace {

at::Tensor replicated_constant(const at::Tensor& plain, const DeviceMesh& mesh) {
  const Placements placements(static_cast<size_t>(mesh.ndim()), Replicate());
  return wrap_local(plain, DTensorSpec::make(mesh, placements, TensorMeta::of(plain)));
}

/// Replaces plain tensors in `value`, a list of at least one DTensor.
void replace_constants(c10::IValue& value) {
  auto tensors = value.toTensorVector();
  const DeviceMesh* mesh = nullptr;
  for (const auto& tensor : tensors) {
    const auto* meta = dtensor_meta(tensor);
    mesh = meta && !mesh ? &meta->spec->mesh() : mesh;
  }
  for (auto& tensor : tensors) {
    if (mesh && !dtensor_meta(tensor)) {
      tensor = replicated_constant(tensor, *mesh);
    }
  }
  value = c10::IValue(std::move(tensors));
}

void join_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (torch::autograd::get_current_graph_task_id() != -1) {
    replace_constants((*stack)[stack->size() - op.schema().arguments().size()]);
  }
  dispatch(op, keys, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("cat", torch::CppFunction::makeFromBoxedFunction<&join_gradients>());
  library.impl("stack", torch::CppFunction::makeFromBoxedFunction<&join_gradients>());
}

}  // namespace tessera
