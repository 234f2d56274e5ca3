#include "dtensor/dispatch/local_arguments.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace tessera {

using torch::jit::Stack;

namespace {

/// Returns the list for argument `value` of the op, with operands i, i + 1, .... Advances i.
template <class Tensors>
c10::IValue local_list(const c10::IValue& value, const CallSignature& call, const Tensors& locals, size_t& i) {
  const size_t arg = call.operands[i].arg;
  if (value.isTensorList()) {
    std::vector<at::Tensor> list;
    for (; i < call.operands.size() && call.operands[i].arg == arg; ++i) {
      list.push_back(locals[i]);
    }
    return list;
  }
  auto list = value.toList().copy();  // Tensor?[]: undefined entries stay
  for (; i < call.operands.size() && call.operands[i].arg == arg; ++i) {
    list.set(call.operands[i].index, c10::IValue(locals[i]));
  }
  return list;
}

/// Fills the placeholders of the call's arguments, the last ones on the stack, with `locals[i]` for operand i.
template <class Tensors>
void put_arguments(const CallSignature& call, const Tensors& locals, Stack* stack) {
  const size_t first = stack->size() - call.args.size();
  size_t i = 0;
  for (size_t arg = 0; arg < call.args.size(); ++arg) {
    auto& value = (*stack)[first + arg];
    if (i == call.operands.size() || call.operands[i].arg != arg) {
      value = call.args[arg];
    } else if (call.args[arg].isTensor()) {
      value = locals[i++];
    } else {
      value = local_list(call.args[arg], call, locals, i);
    }
  }
}

/// Returns zeros with the sizes and strides of the first rank's shard of a tensor.
at::Tensor zeros_of_first_rank(const DTensorSpec& spec, const at::TensorOptions& options) {
  const DimVector origin(spec.placements().size(), 0);
  const auto sizes =
      local_sizes(spec.sizes(), spec.placements(), {.axis_sizes = spec.mesh().shape(), .coordinate = origin});
  return at::empty_strided(sizes, local_strides(sizes, spec.strides()), options).zero_();
}

/// Returns a tensor with the number of dims of `like`, each of size 2.
at::Tensor two_a_dim(const at::Tensor& like) {
  return at::ones(DimVector(static_cast<size_t>(like.dim()), 2), like.options());
}

}  // namespace

DimVector local_strides(at::IntArrayRef sizes, at::IntArrayRef strides) {
  DimVector dims(sizes.size());
  std::iota(dims.begin(), dims.end(), 0);
  std::ranges::stable_sort(dims, std::ranges::greater(),
                           [&](int64_t dim) { return strides[static_cast<size_t>(dim)]; });
  DimVector result(sizes.size());
  int64_t stride = 1;
  for (size_t i = dims.size(); i-- > 0;) {
    const auto dim = static_cast<size_t>(dims[i]);
    result[dim] = stride;
    stride *= std::max<int64_t>(1, sizes[dim]);
  }
  return result;
}

/// Moved tensors are row-major, unless the plan requires a full tensor that keeps its strides.
at::Tensor Locals::moved(const DTensorMeta& from, const DTensorSpec& to) {
  auto local = redistribute_local(from.local, *from.spec, to.placements());
  return to.meta().is_contiguous() ? local : at::empty_strided(to.sizes(), to.strides(), local.options()).copy_(local);
}

void put_local_arguments(const CallSignature& call, const Locals& locals, Stack* stack) {
  put_arguments(call, locals, stack);
}

void dry_run_kernel(const c10::OperatorHandle& op, const CallSignature& call, const Locals& locals) {
  Stack stack(call.args.begin(), call.args.end());
  for (size_t i = 0; i < call.operands.size(); ++i) {
    if (call.operands[i].dtensor) {
      stack[call.operands[i].arg] = two_a_dim(locals[i]);
    }
  }
  op.callBoxed(&stack);
}

void dry_run_on_size_two(const c10::OperatorHandle& op, const Stack& stack) {
  Stack asked(stack.end() - std::ssize(op.schema().arguments()), stack.end());
  for (auto& value : asked) {
    if (value.isTensor() && value.toTensor().defined()) {
      value = two_a_dim(value.toTensor());
    }
  }
  op.callBoxed(&asked);
}

void ask_as_first_rank(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan,
                       const Locals& locals) {
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < call.operands.size(); ++i) {
    parts.push_back(plan.operands[i] ? zeros_of_first_rank(*plan.operands[i], locals[i].options()) : locals[i]);
  }
  Stack stack(call.args.size());
  put_arguments(call, parts, &stack);
  op.callBoxed(&stack);
}

bool make_empty_results(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan,
                        const Locals& locals, Stack* stack) {
  const auto& returns = op.schema().returns();
  const bool one_list = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType;
  if (!one_list && returns.size() != plan.outputs.size()) {
    return false;
  }
  // A plain CPU number may be combined with DTensors on a GPU.
  const auto like = std::find_if(call.operands.begin(), call.operands.end(), [](const auto& o) { return o.dtensor; });
  const auto options = locals[static_cast<size_t>(like - call.operands.begin())].options();
  std::vector<at::Tensor> results;
  for (const auto& spec : plan.outputs) {
    results.push_back(at::empty(spec->local_sizes(), options.dtype(spec->dtype())));
  }
  torch::jit::drop(*stack, op.schema().arguments().size());
  if (one_list) {
    stack->emplace_back(std::move(results));
  } else {
    stack->insert(stack->end(), results.begin(), results.end());
  }
  return true;
}

}  // namespace tessera
