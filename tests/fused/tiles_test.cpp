// What the threads of the GPU's kernels compute, run on the CPU.

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/autograd/autograd.h>

#include "fused/gpu/element_tile.h"
#include "fused/gpu/norm_tile.h"
#include "fused/gpu/rotary_tile.h"
#include "fused/rotary.h"
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

/// Runs the threads of a row's block.
template <class Term, class Write>
void run_block(int64_t row, Term term, Write write) {
  double sum = 0;
  for (int thread = 0; thread < kThreads; ++thread) {
    sum += term(row, thread);
  }
  for (int thread = 0; thread < kThreads; ++thread) {
    write(row, sum, thread);
  }
}

Tensors run_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, bool is_aligned) {
  const auto sum = at::empty_like(x), normed = at::empty_like(x), rstd = at::empty({x.size(0), 1}, x.options());
  const fused::NormRows of{.rows = x.size(0),
                           .features = x.size(1),
                           .eps = 1e-3,
                           .weight_offset = 1,
                           .x = x.const_data_ptr(),
                           .residual = residual.const_data_ptr(),
                           .weight = weight.const_data_ptr(),
                           .sum = sum.mutable_data_ptr(),
                           .normed = normed.mutable_data_ptr(),
                           .rstd = rstd.mutable_data_ptr(),
                           .is_aligned = is_aligned};
  for (int64_t row = 0; row < of.rows; ++row) {
    run_block(
        row, [&](int64_t r, int thread) { return fused::squares_of_thread<double>(of, r, thread, kThreads); },
        [&](int64_t r, double squares, int thread) {
          fused::normalize_by_thread<double>(of, r, squares, thread, kThreads);
        });
  }
  return {sum, normed, rstd};
}

/// Gradients of the sum and of the weight.
Tensors run_norm_gradient(const Tensors& grads, const at::Tensor& sum, const at::Tensor& weight, const at::Tensor& rstd,
                          bool is_aligned) {
  const auto grad_x = at::empty_like(sum), grad_weight = at::empty_like(weight);
  const fused::NormGradientRows of{.rows = sum.size(0),
                                   .features = sum.size(1),
                                   .weight_offset = 1,
                                   .grad = grads[1].const_data_ptr(),
                                   .grad_sum = grads[0].const_data_ptr(),
                                   .x = sum.const_data_ptr(),
                                   .weight = weight.const_data_ptr(),
                                   .rstd = rstd.const_data_ptr(),
                                   .grad_x = grad_x.mutable_data_ptr(),
                                   .is_aligned = is_aligned};
  for (int64_t row = 0; row < of.rows; ++row) {
    run_block(
        row, [&](int64_t r, int thread) { return fused::dot_of_thread<double>(of, r, thread, kThreads); },
        [&](int64_t r, double dot, int thread) {
          fused::differentiate_by_thread<double>(of, r, dot, thread, kThreads);
        });
  }
  for (int64_t column = 0; column < of.features; ++column) {
    grad_weight[column].fill_(fused::weight_gradient<double>(of, 0, 2, column) +
                              fused::weight_gradient<double>(of, 2, of.rows, column));
  }
  return {grad_x, grad_weight};
}

}  // namespace

TEST_CASE("the threads of rms_norm's kernels compute rows, gradients and columns", "[fused]") {
  for (const int64_t features : {1, 7, 22}) {
    const auto all = fused_inputs({{5, features}, {5, features}, {features}, {5, features}, {5, features}});
    const auto x = all[0].requires_grad_(), weight = all[2].requires_grad_();
    const auto sum = x + all[1], normed = at::rms_norm(sum, weight.sizes(), 1 + weight, 1e-3);
    const auto grads = torch::autograd::grad({sum, normed}, {x, weight}, {all[3], all[4]});
    for (const bool is_aligned : {false, features % 2 == 0}) {
      const auto rows = run_norm(x, all[1], weight, is_aligned);
      expect_close(rows[0], sum.detach(), kTight);
      expect_close(rows[1], normed.detach(), kTight);
      const auto actual = run_norm_gradient({all[3], all[4]}, rows[0], weight, rows[2], is_aligned);
      expect_close(actual[0], grads[0], kTight);
      expect_close(actual[1], grads[1], kTight);
    }
  }
}

TEST_CASE("the threads of the rotation's kernel compute each row once", "[fused]") {
  for (const int64_t rotated : {8, 6}) {
    const auto halves = fused_inputs({{5, rotated / 2}, {5, rotated / 2}});
    const auto cos = at::cat({halves[0], halves[0]}, -1), sin = at::cat({halves[1], halves[1]}, -1);
    const auto x = fused_inputs({{2, 5, 3, 10}})[0].transpose(1, 2);
    for (const bool back : {false, true}) {
      const auto expected = rotate_positions(x, cos, back ? -sin : sin);
      auto wide = at::empty_like(x), narrow = at::empty_like(x);
      const auto of_wide = fused::rotary_rows(x, cos, sin, wide, back);
      const auto of_narrow = fused::rotary_rows(x, cos, sin, narrow, back);
      CHECK(fused::allows_accesses(of_wide, 2, 8) == (rotated == 8));
      for (int thread = 0; thread < kThreads; ++thread) {
        if (rotated == 8) {
          fused::rotate_by_thread<double, 2>(of_wide, thread, kThreads);
        }
        fused::rotate_by_thread<double, 1>(of_narrow, thread, kThreads);
      }
      expect_close(narrow, expected, kTight);
      if (rotated == 8) {
        expect_close(wide, expected, kTight);
      }
    }
  }
}

/// `gate`, activated.
template <class Forward, class Backward>
void check_glu_threads(const Tensors& all, int64_t offset, at::Tensor (*activate)(const at::Tensor& gate)) {
  const auto part = [&](size_t i) { return all[i].narrow(0, offset, 23).detach(); };
  const auto grad = part(0), gate = part(1).requires_grad_(), up = part(2).requires_grad_();
  const auto expected = activate(gate) * up;
  expect_close(run_elements<Forward, double>({gate, up}, 23)[0], expected.detach(), kTight);
  const auto grads = torch::autograd::grad({expected}, {gate, up}, {grad});
  const auto actual = run_elements<Backward, double>({grad, gate, up}, 23);
  expect_close(actual[0], grads[0], kTight);
  expect_close(actual[1], grads[1], kTight);
}

TEST_CASE("the threads of gated units' kernels compute each element once", "[fused]") {
  for (const int64_t offset : {0, 1}) {  // 1: not aligned
    const auto all = fused_inputs({{24}, {24}, {24}});
    check_glu_threads<fused::SwigluForward, fused::SwigluBackward>(all, offset,
                                                                   [](const at::Tensor& x) { return at::silu(x); });
    check_glu_threads<fused::TanhGegluForward, fused::TanhGegluBackward>(
        all, offset, [](const at::Tensor& x) { return at::gelu(x, "tanh"); });
  }
}

}  // namespace tessera::testing
