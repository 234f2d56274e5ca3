// Ops with which autograd's formulas assemble gradients from parts, indices and zeros: the gradients of all parts of
// split, chunk and unbind, and zeros where a scatter wrote. Autograd makes plain tensors of known values, such as zeros
// for an unused part, equally on every rank, so they count as replicated during a backward.

#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include "dtensor/dispatch/dispatch.h"
#include "dtensor/dispatch/implicit_replication.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/propagation/op_names.h"
#include "dtensor/propagation/own_kernels.h"

namespace tessera {

namespace {

void join_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t num_args = op.schema().arguments().size();
  const auto& first = torch::jit::peek(*stack, 0, num_args);
  const bool writes_plain = op.schema().is_mutable() && !dtensor_meta(first.toTensor());
  if (torch::autograd::get_current_graph_task_id() != -1 && !writes_plain) {
    apply_implicit_replication(stack, num_args);
  }
  dispatch(op, keys, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const auto& op : aten_ops(kGradientJoins)) {
    library.impl(op.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&join_gradients>());
  }
}

}  // namespace tessera
