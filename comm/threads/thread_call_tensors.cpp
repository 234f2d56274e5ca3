#include "comm/threads/thread_call_tensors.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "comm/backend/backend_checks.h"
#include "comm/threads/thread_call_copies.h"

namespace tessera {

namespace {

void copy_flat_bytes(const at::Tensor& to, const at::Tensor& from) {
  TESSERA_ASSERT(to.nbytes() == from.nbytes(), "{} bytes into {}", from.nbytes(), to.nbytes());
  if (to.numel() != 0 && to.const_data_ptr() != from.const_data_ptr()) {
    flat_bytes(to).copy_(flat_bytes(from), /*non_blocking=*/true);
  }
}

/// Returns the dtype in which values are accumulated.
at::ScalarType accumulator_type(at::ScalarType dtype) {
  return at::isReducedFloatingType(dtype) ? at::kFloat : dtype;
}

/// Rounds each product and sum, unlike a GPU's kernel for complex numbers, which rounds once.
at::Tensor complex_product(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = at::view_as_real(a), y = at::view_as_real(b);
  const at::Tensor x_re = x.select(-1, 0), x_im = x.select(-1, 1), y_re = y.select(-1, 0), y_im = y.select(-1, 1);
  return at::view_as_complex(at::stack({x_re * y_re - x_im * y_im, x_re * y_im + x_im * y_re}, -1));
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_complex()) {
    return complex_product(a, b);
  }
  return a.scalar_type() == at::kBool ? a.logical_and(b) : a * b;
}

/// Returns total op next. Integer overflow wraps; comm/backend/reduce_op.h defines bool.
at::Tensor combine(const at::Tensor& total, const at::Tensor& next, ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Avg:
      return total.scalar_type() == at::kBool ? total.logical_or(next) : total + next;
    case ReduceOp::Product:
      return product(total, next);
    case ReduceOp::Min:
      return at::where(total.lt(next).logical_or_(total.ne(total)), total, next);
    case ReduceOp::Max:
      return at::where(total.gt(next).logical_or_(total.ne(total)), total, next);
  }
  TESSERA_ASSERT(false, "reduction number {}", static_cast<int>(op));
}

// Divides in place, by a tensor, because a number would become a factor 1/n on a GPU.
void divide_by(const at::Tensor& total, size_t ranks) {
  total.div_(at::full({}, static_cast<double>(ranks), total.options()));
}

/// Reduces `inputs` into `output`, which may be one of them.
void reduce(const at::Tensor& output, std::vector<at::Tensor> inputs, ReduceOp op) {
  if (output.numel() == 0) {
    return;
  }
  if (output.is_complex() && op != ReduceOp::Product) {
    // Real and imaginary part separately: ATen's sum has a complex factor, which turns one part NaN if the other is
    // infinite.
    std::transform(inputs.begin(), inputs.end(), inputs.begin(), at::view_as_real);
    return reduce(at::view_as_real(output), std::move(inputs), op);
  }
  const auto dtype = accumulator_type(output.scalar_type());
  at::Tensor total = inputs[0].to(dtype, /*non_blocking=*/false, /*copy=*/true);  // overwritten by divide_by()
  for (size_t rank = 1; rank < inputs.size(); ++rank) {
    total = combine(total, inputs[rank].to(dtype), op);
  }
  if (op == ReduceOp::Avg) {
    divide_by(total, inputs.size());
  }
  output.copy_(total);
}

void reduce_scatter_by_tensor_ops(c10::ArrayRef<CollectiveCall> calls) {
  const int64_t count = calls[0].output.numel();
  for (size_t to = 0; to < calls.size(); ++to) {
    std::vector<at::Tensor> sent;
    for (const CollectiveCall& from : calls) {
      sent.push_back(flat_elements(from.input, static_cast<int64_t>(to) * count, count));
    }
    reduce(flat_elements(calls[to].output), sent, calls[0].op);
  }
}

void all_reduce_by_tensor_ops(c10::ArrayRef<CollectiveCall> calls) {
  std::vector<at::Tensor> tensors;
  for (const CollectiveCall& call : calls) {
    tensors.push_back(flat_elements(call.output));
  }
  reduce(tensors[0], tensors, calls[0].op);
  for (const CollectiveCall& call : calls.slice(1)) {
    copy_flat_bytes(flat_elements(call.output), tensors[0]);
  }
}

void copy_by_tensor_ops(c10::ArrayRef<CollectiveCall> calls) {
  for (const ElementCopy& copy : plan_copies(calls)) {
    copy_flat_bytes(flat_elements(calls[copy.to].output, copy.to_begin, copy.count),
                    flat_elements(sent_tensor(calls[copy.from]), copy.from_begin, copy.count));
  }
}

// Throws for a tensor without memory, such as a DTensor, because the copies would call the DTensor's ops.
void check_memory(c10::ArrayRef<CollectiveCall> calls) {
  for (const CollectiveCall& call : calls) {
    for (const at::Tensor* tensor : {&call.input, &call.output}) {
      if (tensor->defined()) {
        tensor->const_data_ptr();
      }
    }
  }
}

}  // namespace

void execute_by_tensor_ops(c10::ArrayRef<CollectiveCall> calls) {
  check_memory(calls);
  const at::AutoDispatchBelowADInplaceOrView guard;  // without autograd and version counters
  switch (calls[0].kind) {
    case Collective::AllGather:
    case Collective::Broadcast:
    case Collective::AllToAll:
    case Collective::Send:
      return copy_by_tensor_ops(calls);
    case Collective::ReduceScatter:
      return reduce_scatter_by_tensor_ops(calls);
    case Collective::AllReduce:
      return all_reduce_by_tensor_ops(calls);
    case Collective::Barrier:
    case Collective::Scatter:
    case Collective::Gather:
    case Collective::Recv:
      break;
  }
  TESSERA_ASSERT(false, "{} is not a call by tensor operations", name(calls[0].kind));
}

}  // namespace tessera
