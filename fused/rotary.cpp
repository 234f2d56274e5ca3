#include "fused/rotary.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "fused/cpu/rotary_kernels.h"
#include "fused/fused_ops.h"

namespace tessera {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor rotate_by_ops(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const int64_t rotated = cos.size(-1), rest = x.size(-1) - rotated;
  if (rest > 0) {
    return at::cat({rotate_by_ops(x.narrow(-1, 0, rotated), cos, sin), x.narrow(-1, rotated, rest)}, -1);
  }
  const auto halves = x.chunk(2, -1);
  return x * cos + at::cat({-halves[1], halves[0]}, -1) * sin;
}

const fused::RotaryKernels& rotary_kernels_of_cpu() {
  return fused::for_this_cpu([](auto set) -> const fused::RotaryKernels& { return fused::rotary_kernels(set); });
}

at::Tensor rotate_cpu(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool back) {
  const auto rows = x.stride(3) == 1 ? x : x.contiguous();
  const auto cosines = cos.contiguous(), sines = sin.contiguous();
  auto out = at::empty_like(rows);
  const auto of = fused::rotary_rows(rows, cosines, sines, out, back);
  const int64_t grain = std::max<int64_t>(1, fused::kElementsOfThread / std::max<int64_t>(1, of.row_size));
  at::parallel_for(0, of.count(), grain, [&](int64_t begin, int64_t end) {
    rotary_kernels_of_cpu().rotate(of, x.scalar_type(), begin, end);
  });
  return out;
}

at::Tensor rotate_meta(const at::Tensor& x, const at::Tensor& /*cos*/, const at::Tensor& /*sin*/, bool /*back*/) {
  return at::empty_like(x.stride(3) == 1 ? x : x.contiguous());
}

at::Tensor call_rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool back) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("tessera::rotate_positions", "").typed<decltype(rotate_cpu)>();
  return op.call(x, cos, sin, back);
}

class RotaryFunction : public torch::autograd::Function<RotaryFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                            bool back) {
    const at::AutoDispatchBelowAutograd below;
    context->save_for_backward({cos, sin});
    context->saved_data["back"] = back;
    return call_rotate(x, cos, sin, back);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    return {call_rotate(grads[0], saved[0], saved[1], !context->saved_data["back"].toBool()), at::Tensor(),
            at::Tensor(), at::Tensor()};
  }
};

at::Tensor rotate_autograd(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool back) {
  return RotaryFunction::apply(x, cos, sin, back);
}

/// Whether a table is [length, features] or [batch, 1, length, features] of x.
bool is_table(const at::Tensor& table, const at::Tensor& x) {
  const bool is_of_lengths = table.dim() == 2 || (table.dim() == 4 && table.size(0) == x.size(0) && table.size(1) == 1);
  return is_of_lengths && table.size(-2) == x.size(2) && table.size(-1) <= x.size(3) && table.size(-1) % 2 == 0 &&
         table.scalar_type() == x.scalar_type() && !table.requires_grad();
}

}  // namespace

at::Tensor rotate_positions(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const bool is_taken =
      fused::takes_kernels(x) && x.dim() == 4 && is_table(cos, x) && is_table(sin, x) && cos.sizes() == sin.sizes();
  return is_taken ? call_rotate(x, cos, sin, /*back=*/false) : rotate_by_ops(x, cos, sin);
}

}  // namespace tessera

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  library.def("rotate_positions(Tensor x, Tensor cos, Tensor sin, bool back) -> Tensor");
}

TORCH_LIBRARY_IMPL(tessera, CPU, library) {
  library.impl("rotate_positions", &tessera::rotate_cpu);
}

TORCH_LIBRARY_IMPL(tessera, Meta, library) {
  library.impl("rotate_positions", &tessera::rotate_meta);
}

TORCH_LIBRARY_IMPL(tessera, Autograd, library) {
  library.impl("rotate_positions", &tessera::rotate_autograd);
}
