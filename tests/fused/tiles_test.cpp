// What the threads of the GPU's kernels compute, run on the CPU.

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/autograd/autograd.h>

#include "fused/gpu/element_tile.h"
#include "testing/tensor_matchers.h"
#include "tests/fused/fused_cases.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr Tolerance kTight{.rtol = 1e-12, .atol = 1e-12};
constexpr int kThreads = 5;

template <class Op, class T>
Tensors run_elements(const Tensors& in, int64_t count) {
  fused::ElementOperands<Op::kIn, Op::kOut> of{.in = {}, .out = {}, .count = count};
  Tensors out;
  for (size_t i = 0; i < in.size(); ++i) {
    of.in[i] = in[i].const_data_ptr();
  }
  for (auto& address : of.out) {
    out.push_back(at::empty_like(in[0]));
    address = out.back().mutable_data_ptr();
  }
  for (int thread = 0; thread < kThreads; ++thread) {
    fused::compute_elements<Op, T>(of, of.is_aligned(), thread, kThreads);
  }
  return out;
}

}  // namespace

TEST_CASE("the threads of swiglu's kernels compute each element once", "[fused]") {
  for (const int64_t offset : {0, 1}) {  // 1: not aligned
    const auto all = fused_inputs({{24}, {24}, {24}});
    const auto grad = all[0].narrow(0, offset, 23), gate = all[1].narrow(0, offset, 23).detach().requires_grad_();
    const auto up = all[2].narrow(0, offset, 23).detach().requires_grad_();
    const auto expected = at::silu(gate) * up;
    expect_close(run_elements<fused::SwigluForward, double>({gate, up}, 23)[0], expected.detach(), kTight);
    const auto grads = torch::autograd::grad({expected}, {gate, up}, {grad});
    const auto actual = run_elements<fused::SwigluBackward, double>({grad, gate, up}, 23);
    expect_close(actual[0], grads[0], kTight);
    expect_close(actual[1], grads[1], kTight);
  }
}

}  // namespace tessera::testing
