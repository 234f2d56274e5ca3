// Gradients of split, chunk and unbind join the gradients of all parts. Autograd makes plain zeros for parts that were
// not used, and cat and stack would meet them beside DTensors. Every rank makes the same ones, so during a backward
// they count as replicated.

#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include "dtensor/dispatch.h"
#include "dtensor/dispatch_scopes.h"

namespace tessera {

namespace {

void join_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (torch::autograd::get_current_graph_task_id() != -1) {
    replicate_plain_tensors(stack, op.schema().arguments().size());
  }
  dispatch(op, keys, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("cat", torch::CppFunction::makeFromBoxedFunction<&join_gradients>());
  library.impl("stack", torch::CppFunction::makeFromBoxedFunction<&join_gradients>());
}

}  // namespace tessera
