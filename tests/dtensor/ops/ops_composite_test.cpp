// Composite ops, and gradients, for which ATen makes plain tensors of sizes and numbers.

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/affine_grid_generator.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/combinations.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/ctc_loss.h>
#include <ATen/ops/cummax.h>
#include <ATen/ops/cummin.h>
#include <ATen/ops/diagonal_scatter.h>
#include <ATen/ops/glu.h>
#include <ATen/ops/istft.h>
#include <ATen/ops/linalg_householder_product.h>
#include <ATen/ops/linalg_matrix_exp.h>
#include <ATen/ops/linalg_matrix_power.h>
#include <ATen/ops/linalg_matrix_rank.h>
#include <ATen/ops/matrix_exp.h>
#include <ATen/ops/nanquantile.h>
#include <ATen/ops/one_hot.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/pdist.h>
#include <ATen/ops/quantile.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/select_scatter.h>
#include <ATen/ops/slice_scatter.h>
#include <ATen/ops/stft.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/trace.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/version.h>

#include <cmath>
#include <functional>

#include "dtensor/dispatch/dispatch_scopes.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/dtensor/op_oracle.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

/// A plain tensor as it goes with `other`.
at::Tensor beside(const at::Tensor& plain, const at::Tensor& other) {
  const auto moved = plain.to(other.device());
  return is_dtensor(other) ? from_local(moved, device_mesh(other), Placements(placements(other).size(), Replicate()))
                           : moved;
}

at::Tensor numbers(std::vector<int64_t> values) {
  return at::tensor(values, at::kLong);
}

/// The gradient of `function`, which check_op differentiates again.
OpCase gradient_of(const char* name, const std::function<at::Tensor(const at::Tensor&)>& function) {
  return {.name = name, .inputs = {{{5, 4}}}, .call = [function](const Tensors& x) -> Tensors {
            const auto result = function(x[0]).square().sum();
            return torch::autograd::grad({result}, {x[0]}, {}, /*retain_graph=*/true, /*create_graph=*/true);
          }};
}

}  // namespace

TEST_CASE("ops that make masks, indices and bounds", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "one_hot",
       .inputs = {indices({5, 3}, 4)},
       .call = [](const Tensors& x) -> Tensors {
         return {at::one_hot(x[0], 6), at::one_hot(x[0])};
       }},
      {.name = "combinations",
       .inputs = {{{5}}},
       .call = [](const Tensors& x) -> Tensors { return {at::combinations(x[0], 2)}; }},
      {.name = "matrix powers",
       .inputs = {{{2, 3, 3}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::linalg_matrix_power(x[0], 0), at::linalg_matrix_power(x[0], 3)};
       }},
      {.name = "matrix ranks",
       .inputs = {{{2, 5, 3}}, {{2, 3, 3}}, positive({2})},
       .call = [](const Tensors& x) -> Tensors {
         const auto of_rank_1 = x[0].narrow(2, 0, 1) * x[0].narrow(1, 0, 1);
         const auto symmetric = x[1] + x[1].mT();
         return {at::linalg_matrix_rank(x[0], /*tol=*/1.0), at::linalg_matrix_rank(of_rank_1, {}, {}),
                 at::linalg_matrix_rank(symmetric, std::optional<double>(0.1), 0.2, /*hermitian=*/true),
                 at::linalg_matrix_rank(x[0], x[2])};
       }},
      {.name = "causal attention without heads",
       .inputs = {{{4, 3, 5}}, {{4, 3, 5}}, {{4, 3, 5}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0, /*is_causal=*/true)};
       }},
  }));
}

TEST_CASE("quantiles", "[dtensor][ops]") {
  using T = const Tensors&;
  const auto some = at::tensor({0.1, 0.5, 1.0}, at::kDouble);
  std::vector<OpCase> cases{
      {.name = "of a number",
       .inputs = {{{5, 3}}},
       .call = [](T x) -> Tensors {
         return {at::quantile(x[0], 0.3), at::quantile(x[0], 0.3, 0, /*keepdim=*/true), at::quantile(x[0], 1, -1),
                 at::quantile(x[0], 0, {}, /*keepdim=*/true), at::quantile(x[0].sum(), 0.5, 0)};
       }},
      {.name = "of some",
       .inputs = {{{2, 5, 3}}},
       .call = [some](T x) -> Tensors {
         return {at::quantile(x[0], some.to(x[0].device())), at::quantile(x[0], beside(some, x[0]), 1),
                 at::quantile(x[0], beside(some, x[0]), 0, /*keepdim=*/true)};
       }},
      {.name = "with gaps", .inputs = {{{7, 3}}}, .call = [some](T x) -> Tensors {
         const auto gaps = x[0].masked_fill(x[0].detach().gt(0.5), std::nan(""));
         const auto one_gap = x[0].masked_fill(x[0].detach().eq(x[0].detach().amax()), std::nan(""));
         return {at::nanquantile(gaps, 0.3, 0).nan_to_num(), at::nanquantile(gaps, beside(some, gaps), 1).nan_to_num(),
                 at::quantile(one_gap, 0.4, 0).nan_to_num(), at::quantile(one_gap, 0.4).nan_to_num()};
       }}};
  for (const char* interpolation : {"lower", "higher", "midpoint", "nearest"}) {
    cases.push_back({.name = interpolation, .inputs = {{{6, 4}}}, .call = [=](T x) -> Tensors {
                       return {at::quantile(x[0], 0.3, 0, false, interpolation),
                               at::quantile(x[0], beside(some, x[0]), 1, false, interpolation)};
                     }});
  }
  CHECK_NOTHROW(check_ops(cases));
}

TEST_CASE("of equal elements the first ones are the lower places of a quantile, in every layout", "[dtensor][ops]") {
  const auto x = at::arange(240, at::kDouble).mul(7).remainder(11).div(4, "floor").view({60, 4});  // 0, 1 and 2
  const auto gradient = [](at::Tensor leaf, const std::function<at::Tensor(const at::Tensor&)>& call) {
    leaf = leaf.detach().requires_grad_();
    return torch::autograd::grad({call(leaf).sum()}, {leaf})[0];
  };
  const auto expected = gradient(x, [](const at::Tensor& t) {
    return std::get<0>(t.sort(/*stable=*/true, 0, /*descending=*/false)).select(0, 30);
  });
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks});
      for (const Placement placement : {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1))}) {
        const auto actual = gradient(distribute_tensor(x, mesh, {placement}),
                                     [](const at::Tensor& t) { return at::quantile(t, 0.51, 0, false, "lower"); });
        expect_bit_equal(full_tensor(actual), expected);
      }
    });
  }
}

TEST_CASE("the place of a quantile of 32 bits is not rounded to them", "[dtensor][ops]") {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const auto x = distribute_tensor(at::arange(101, at::kFloat), mesh, {Shard(0)});
    for (int percent = 0; percent <= 100; ++percent) {
      const auto place = static_cast<double>(static_cast<float>(percent / 100.)) * 100;
      const auto lower = at::quantile(x, percent / 100., 0, /*keepdim=*/false, "lower");
      expect_equal(full_tensor(lower).item<double>(), std::floor(place));
    }
  });
}

TEST_CASE("quantiles that are none are refused", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(at::ones({3, 2}), mesh, {Shard(0)});
    expect_throws<ValueError>([&] { at::quantile(x, 1.5); }, "q 1.5; it is from 0 to 1");
    expect_throws<ValueError>([&] { at::quantile(x, 0.5, 0, false, "cubic"); }, "there are linear, lower");
    expect_throws<ValueError>([&] { at::quantile(x.to(at::kLong), 0.5); }, "Float or Double, not Long");
    expect_throws<ValueError>([&] { at::quantile(x, at::ones({1}, at::kDouble)); }, "dtype Float, not Double[1]");
    expect_throws<NotImplementedError>([&] { at::quantile(x, at::ones({1}).requires_grad_()); }, "q gets no gradient");
    expect_throws<ValueError>([&] { at::quantile(x.narrow(0, 0, 0), 0.5); }, "without elements");
    expect_throws<c10::IndexError>([&] { at::quantile(x, 0.5, 2); }, "Dimension out of range");
  });
}

TEST_CASE("a spectrum and back, without a window", "[dtensor][ops]") {
  const auto there_and_back = [](const Tensors& x) -> Tensors {
    const auto spectrum = at::stft(x[0], 8, 4, 8, {}, /*center=*/true, "reflect", /*normalized=*/false,
                                   /*onesided=*/true, /*return_complex=*/true);
    return {at::istft(spectrum, 8, 4, 8), at::istft(spectrum, 8, 4)};
  };
  CHECK_NOTHROW(check_op({.name = "stft and istft", .inputs = {{{3, 40}}}, .call = there_and_back}));
}

TEST_CASE("spectra through a window that is shorter than they are, or none", "[dtensor][ops]") {
  const auto spectrum = [](const at::Tensor& x, const std::optional<at::Tensor>& window, int64_t length, bool center) {
    return at::view_as_real(at::stft(x, 8, 3, length, window, center, "reflect", false, true, true));
  };
  const auto through_window = [=](const Tensors& x) -> Tensors {
    return {spectrum(x[0], x[1], x[1].numel(), true), spectrum(x[0], x[1], x[1].numel(), false)};
  };
  CHECK_NOTHROW(check_ops({
      {.name = "stft, short window", .inputs = {{{2, 21}}, {{5}}}, .call = through_window},
      {.name = "stft, long window", .inputs = {{{2, 21}}, {{8}}}, .call = through_window},
      {.name = "stft, short and of ones",
       .inputs = {{{2, 21}}},
       .call = [=](const Tensors& x) -> Tensors {
         return {spectrum(x[0], {}, 5, true),
                 at::view_as_real(at::stft(x[0], 8, 3, 5, {}, /*normalized=*/true, true, true))};
       }},
  }));
  run_ranks(2, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(at::randn({2, 21}, make_generator(1)), mesh, {Shard(0)});
    const auto window = at::ones({5});
    expect_throws<ValueError>([&] { spectrum(x, window, 5, true); }, "aten::stft: the window is a plain tensor");
    const auto whole = at::stft(x, 8, 3, 8, {}, true, "reflect", false, true, true);
    expect_throws<ValueError>([&] { at::istft(whole, 8, 3, 5, window); }, "aten::istft: the window is a plain tensor");
    expect_throws<c10::Error>([&] { spectrum(x, distribute_tensor(window, mesh, {Replicate()}), 6, true); },
                              "expected a 1D window tensor of size equal to win_length=6");
    const ImplicitReplication as_copies;
    expect_close(full_tensor(spectrum(x, window, 5, true)), spectrum(full_tensor(x), window, 5, true));
  });
}

TEST_CASE("connectionist temporal classification", "[dtensor][ops]") {
  const auto loss = [](const char* name, auto call) {
    return OpCase{.name = name,
                  .inputs = {{{6, 2, 5}}, indices({2, 3}, 4)},
                  .call = [call](const Tensors& x) -> Tensors { return {call(x[0].log_softmax(2), x[1] + 1)}; },
                  .cpu_only = true};
  };
  using T = const at::Tensor&;
  CHECK_NOTHROW(check_ops({
      loss("lengths as numbers",
           [](T probs, T targets) {
             return at::ctc_loss(probs, targets, at::IntArrayRef{6, 5}, at::IntArrayRef{3, 2});
           }),
      loss("lengths as plain tensors",
           [](T probs, T targets) {
             return at::ctc_loss(probs, targets, numbers({6, 5}), numbers({3, 2}));
           }),
      loss("lengths as DTensors",
           [](T probs, T targets) {
             return at::ctc_loss(probs, targets, beside(numbers({6, 5}), probs), beside(numbers({3, 2}), probs), 0,
                                 at::Reduction::Sum);
           }),
  }));
}

TEST_CASE("fill_diagonal_", "[dtensor][ops]") {
  const auto filled = [](std::vector<int64_t> sizes, bool wrap) -> OpCase {
    return {.name = wrap ? "wrapped" : "main diagonal",
            .inputs = {{std::move(sizes)}},
            .call = [wrap](const Tensors& x) -> Tensors {
              auto y = x[0] * 2;
              return {y.fill_diagonal_(0.5, wrap), y};
            },
            .in_place = true};
  };
  CHECK_NOTHROW(check_ops({filled({5, 4}, false), filled({4, 5}, true), filled({7, 2}, false), filled({7, 2}, true),
                           filled({3, 2}, true), filled({3, 3, 3}, true), filled({0, 3}, true)}));
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto ones = [&](at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
      return distribute_tensor(at::ones(sizes, dtype), mesh, {Shard(0)});
    };
    expect_throws<ValueError>([&] { ones({3}).fill_diagonal_(0); }, "aten::fill_diagonal_: [3] has no diagonal");
    expect_throws<ValueError>([&] { ones({3, 3, 2}).fill_diagonal_(0); }, "more than 2 dims need equal sizes");
    expect_bit_equal(full_tensor(ones({3, 3}, at::kLong).fill_diagonal_(2.5)),
                     at::ones({3, 3}, at::kLong).fill_diagonal_(2.5));
    auto columns = ones({2, 5}).t();
    expect_bit_equal(full_tensor(columns.fill_diagonal_(0, /*wrap=*/true)),
                     at::ones({2, 5}).t().fill_diagonal_(0, /*wrap=*/true));
  });
}

TEST_CASE("the gradient of Householder reflectors, whose formula writes columns of what is cut", "[dtensor][ops]") {
  const auto gradients = [](at::Tensor vectors, at::Tensor scales) {
    vectors = vectors.detach().requires_grad_();
    scales = scales.detach().requires_grad_();
    const auto product = at::linalg_householder_product(vectors, scales);
    return torch::autograd::grad({product.square().sum() + product.sum()}, {vectors, scales});
  };
  const auto vectors = at::randn({2, 5, 3}, at::kDouble), scales = at::randn({2, 3}, at::kDouble);
  const auto expected = gradients(vectors, scales);
  for (const auto& shape : std::vector<std::vector<int64_t>>{{1}, {2}, {4}, {2, 2}}) {
    run_ranks(static_cast<int>(c10::multiply_integers(shape)), [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, shape);
      for (const Placement first :
           {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1)), Placement(Shard(2))}) {
        for (const Placement second : {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1))}) {
          Placements of_vectors(shape.size(), Shard(1)), of_scales(shape.size(), second);
          of_vectors[0] = first;
          const auto actual =
              gradients(distribute_tensor(vectors, mesh, of_vectors), distribute_tensor(scales, mesh, of_scales));
          expect_close(full_tensor(actual[0]), expected[0]);
          expect_close(full_tensor(actual[1]), expected[1]);
        }
      }
    });
  }
}

TEST_CASE("gradients whose formulas make tensors", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "select_scatter, diagonal_scatter",
       .inputs = {{{4, 4}}, {{4}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::select_scatter(x[0], x[1], 0, 2), at::select_scatter(x[0], x[1], 1, 0),
                 at::diagonal_scatter(x[0], x[1])};
       }},
      {.name = "slice_scatter",
       .inputs = {{{4, 4}}, {{2, 4}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::slice_scatter(x[0], x[1], 0, 1, 3), at::slice_scatter(x[0], x[1].t(), 1, 0, 4, 2)};
       }},
      {.name = "matrix_exp",
       .inputs = {{{3, 2, 2}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::linalg_matrix_exp(x[0]), at::matrix_exp(x[0].mT())};
       }},
      {.name = "matrix_exp of complex numbers",
       .inputs = {{{2, 3, 3}}, {{2, 3, 3}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::view_as_real(at::linalg_matrix_exp(at::complex(x[0], x[1])))};
       }},
      {.name = "put",
       .inputs = {{{4, 4}}, {{3}}},
       .call = [](const Tensors& x) -> Tensors {
         return {x[0].put(beside(numbers({1, 7, 15}), x[0]), x[1])};
       }},
      {.name = "cummax, cummin",
       .inputs = {{{5, 4}}},
       .call = [](const Tensors& x) -> Tensors {
         return {std::get<0>(at::cummax(x[0], 0)), std::get<0>(at::cummin(x[0], 1))};
       }},
      {.name = "trace", .inputs = {{{5, 4}}}, .call = [](const Tensors& x) -> Tensors { return {at::trace(x[0])}; }},
      {.name = "affine_grid",
       .inputs = {{{2, 2, 3}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::affine_grid_generator(x[0], {2, 3, 4, 5}, /*align_corners=*/false)};
       }},
  }));
}

TEST_CASE("gradients of gradients whose formulas make tensors", "[dtensor][ops]") {
  CHECK_NOTHROW(check_op(gradient_of("glu", [](const at::Tensor& x) { return at::glu(x, 1); })));
  CHECK_NOTHROW(check_op(
      gradient_of("matrix_exp", [](const at::Tensor& x) { return at::linalg_matrix_exp(x.narrow(0, 0, 4)); })));
}

TEST_CASE("the gradient of pdist's gradient", "[dtensor][ops]") {
  const auto test = gradient_of("pdist", [](const at::Tensor& x) { return at::pdist(x); });
  try {
    test.call({at::ones({5, 4}).requires_grad_()})[0].sum().backward();
  } catch (const c10::NotImplementedError&) {
    WARN("skipped: libtorch " TORCH_VERSION " has no such gradient");
    return;
  }
  CHECK_NOTHROW(check_op(test));
}

TEST_CASE("plain tensors of a program's own are refused in a backward too", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(at::ones({4}), mesh, {Shard(0)}).requires_grad_();
    x.register_hook([](const at::Tensor& grad) { return grad * at::ones({4}); });
    expect_throws<ValueError>([&] { x.mul(2).sum().backward(); },
                              "aten::mul.Tensor: DTensors and plain tensors are mixed");
  });
}

TEST_CASE("classes that are none are refused on every rank", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto classes = distribute_tensor(numbers({0, 1, 4}), mesh, {Shard(0)});
    expect_throws<ValueError>([&] { at::one_hot(classes, 4); }, "classes from 0 to 4, of 4");
    expect_throws<ValueError>([&] { at::one_hot(classes - 1, 4); }, "classes from -1 to 3, of 4");
    expect_throws<ValueError>([&] { at::one_hot(classes, 0); }, "0 classes for 3 elements");
    // What a user made may differ between ranks.
    const auto query = distribute_tensor(at::zeros({2, 3, 4}), mesh, {Shard(0)});
    expect_throws<ValueError>([&] { at::scaled_dot_product_attention(query, query, at::zeros({2, 3, 4})); }, "mixed");
  });
}

}  // namespace tessera
