#include "comm/nccl/nccl_reduction.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <limits>

#include "base/error.h"
#include "comm/backend/backend_checks.h"
#include "comm/backend/stream_event.h"

namespace tessera {

namespace {

/// Returns a tensor that NCCL can reduce: complex numbers become pairs.
at::Tensor as_reducible(const char* place, const at::Tensor& tensor, ReduceOp op) {
  if (tensor.is_complex() && (op == ReduceOp::Sum || op == ReduceOp::Avg)) {
    return flat_elements(at::view_as_real(tensor));
  }
  switch (tensor.scalar_type()) {
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kBool:
      return flat_elements(tensor);
    default:
      throw NotImplementedError(fmt::format("{}({}) of {}: NCCL has none; convert the tensor, to int or float say",
                                            place, op, c10::toString(tensor.scalar_type())));
  }
}

bool drops_nan(const at::Tensor& output, ReduceOp op) {
  return (op == ReduceOp::Min || op == ReduceOp::Max) && output.is_floating_point() && output.numel() != 0;
}

/// Returns the elements in equal parts, each followed by its flags.
at::Tensor with_flags(const at::Tensor& flat, int64_t parts, ReduceOp op) {
  const at::Tensor values = flat.view({parts, flat.numel() / parts});
  const at::Tensor flags = values.isnan().to(flat.scalar_type());
  return at::cat({values, op == ReduceOp::Max ? flags : flags.neg()}, 1).flatten();
}

/// Keeps the memory, which belongs to the stream that issued the reduction, for the current stream.
void keep_for_current_stream(const at::Tensor& tensor) {
  if (has_streams(tensor.device().type())) {
    tensor.record_stream(c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()));
  }
}

std::function<void()> taking_flagged(const at::Tensor& to, const at::Tensor& reduced, const at::Tensor& sent) {
  return [=] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const at::Tensor values = reduced.narrow(0, 0, to.numel()), flags = reduced.narrow(0, to.numel(), to.numel());
    to.copy_(values.masked_fill(flags.ne(0), std::numeric_limits<double>::quiet_NaN()));
    keep_for_current_stream(reduced);
    keep_for_current_stream(sent);
  };
}

}  // namespace

NcclReduction nccl_all_reduce(const at::Tensor& tensor, ReduceOp op) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const at::Tensor flat = as_reducible("all_reduce", tensor, op);
  if (!drops_nan(flat, op)) {
    return {.output = flat, .input = flat};
  }
  const at::Tensor flagged = with_flags(flat, 1, op);
  return {.output = flagged, .input = flagged, .finish = taking_flagged(flat, flagged, flagged)};
}

NcclReduction nccl_reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const at::Tensor to = as_reducible("reduce_scatter", output, op), from = as_reducible("reduce_scatter", input, op);
  if (!drops_nan(to, op)) {
    return {.output = to, .input = from};
  }
  const at::Tensor sent = with_flags(from, from.numel() / to.numel(), op);
  const at::Tensor reduced = at::empty({2 * to.numel()}, to.options());
  return {.output = reduced, .input = sent, .finish = taking_flagged(to, reduced, sent)};
}

}  // namespace tessera
