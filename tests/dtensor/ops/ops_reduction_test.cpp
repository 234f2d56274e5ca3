#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/count_nonzero.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/median.h>
#include <ATen/ops/mode.h>
#include <ATen/ops/nanmedian.h>
#include <ATen/ops/nansum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/std.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/var.h>
#include <ATen/ops/var_mean.h>

#include <cmath>

#include "base/error.h"
#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "dtensor/local/redistribute.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "tests/dtensor/op_oracle.h"
#include "tests/dtensor/test_values.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

using Functions = std::vector<std::pair<const char*, TensorFunction>>;

std::vector<OpCase> over(std::vector<std::vector<int64_t>> sizes, const Functions& functions) {
  std::vector<OpCase> cases;
  for (const auto& size : sizes) {
    for (const auto& [name, function] : functions) {
      cases.push_back({.name = name, .inputs = {{size}}, .call = [function = function](const Tensors& x) -> Tensors {
                         return {function(x[0])};
                       }});
    }
  }
  return cases;
}

}  // namespace

TEST_CASE("sums and means", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops(over(
      {{5, 3}, {2, 1}},
      {
          {"sum", [](const at::Tensor& x) { return x.sum(); }},
          {"sum over rows", [](const at::Tensor& x) { return x.sum(0); }},
          {"sum, keepdim", [](const at::Tensor& x) { return x.sum({-1}, true); }},
          {"sum over both",
           [](const at::Tensor& x) {
             return x.sum(at::IntArrayRef{0, 1});
           }},
          {"sum_to_size",
           [](const at::Tensor& x) {
             return x.sum_to_size({1, x.size(1)});
           }},
          {"mean", [](const at::Tensor& x) { return x.mean(); }},
          {"mean over rows", [](const at::Tensor& x) { return x.mean(0); }},
          {"mean, keepdim", [](const at::Tensor& x) { return x.mean({1}, true); }},
          {"prod", [](const at::Tensor& x) { return x.prod(); }},
          {"prod over rows", [](const at::Tensor& x) { return x.prod(0); }},
          {"nansum", [](const at::Tensor& x) { return at::nansum(x, at::IntArrayRef{0}); }},
          {"cumsum", [](const at::Tensor& x) { return x.cumsum(0); }},
          {"cumprod", [](const at::Tensor& x) { return x.cumprod(1); }},
          {"count_nonzero", [](const at::Tensor& x) { return at::count_nonzero(x.gt(0)); }},
          {"sum of booleans", [](const at::Tensor& x) { return x.gt(0).sum(1); }},
          {"mean in float32", [](const at::Tensor& x) { return x.mean(0, false, at::kFloat).to(at::kDouble).mul(0); }},
      })));
}

TEST_CASE("sums of no elements", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops(over({{0, 3}}, {
                                             {"sum", [](const at::Tensor& x) { return x.sum(); }},
                                             {"sum over nothing", [](const at::Tensor& x) { return x.sum(0); }},
                                             {"prod over nothing", [](const at::Tensor& x) { return x.prod(0); }},
                                             {"any over nothing", [](const at::Tensor& x) { return x.gt(0).any(0); }},
                                         })));
}

TEST_CASE("largest and smallest", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops(
      over({{5, 3}, {2, 1}},
           {
               {"max", [](const at::Tensor& x) { return x.max(); }},
               {"min", [](const at::Tensor& x) { return x.min(); }},
               {"amax over rows", [](const at::Tensor& x) { return at::amax(x, {0}); }},
               {"amax, keepdim",
                [](const at::Tensor& x) {
                  return at::amax(x, {0, 1}, true);
                }},
               {"amin", [](const at::Tensor& x) { return at::amin(x, {1}); }},
               {"max.dim", [](const at::Tensor& x) { return std::get<0>(x.max(0)); }},
               {"max.dim's indices", [](const at::Tensor& x) { return std::get<1>(x.max(1)); }},
               {"min.dim", [](const at::Tensor& x) { return std::get<0>(x.min(1, true)); }},
               {"argmax", [](const at::Tensor& x) { return x.argmax(); }},
               {"argmax over rows", [](const at::Tensor& x) { return x.argmax(0); }},
               {"argmin, keepdim", [](const at::Tensor& x) { return x.argmin(1, true); }},
               {"amax of integers", [](const at::Tensor& x) { return at::amax(x.mul(10).to(at::kInt), {0}); }},
               {"amin of bytes", [](const at::Tensor& x) { return at::amin(x.abs().mul(10).to(at::kByte), {0}); }},
               {"any", [](const at::Tensor& x) { return x.gt(1).any(); }},
               {"any over rows", [](const at::Tensor& x) { return x.gt(1).any(0); }},
               {"all", [](const at::Tensor& x) { return x.gt(-1).all(); }},
               {"all over columns", [](const at::Tensor& x) { return x.gt(-1).all(1, true); }},
               {"topk", [](const at::Tensor& x) { return std::get<0>(at::topk(x, 2, 0)); }},
               {"sort", [](const at::Tensor& x) { return std::get<0>(x.sort(0)); }},
               {"argsort", [](const at::Tensor& x) { return x.argsort(1, true); }},
               {"median", [](const at::Tensor& x) { return std::get<0>(x.median(0)); }},
           })));
}

TEST_CASE("norms", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops(over(
      {{5, 3}, {2, 1}}, {
                            {"norm", [](const at::Tensor& x) { return x.norm(); }},
                            {"norm 3", [](const at::Tensor& x) { return x.norm(3); }},
                            {"norm 1", [](const at::Tensor& x) { return x.norm(1); }},
                            {"norm 0", [](const at::Tensor& x) { return x.norm(0); }},
                            {"norm inf", [](const at::Tensor& x) { return x.norm(kInf); }},
                            {"norm -inf", [](const at::Tensor& x) { return x.norm(-kInf); }},
                            {"norm -1", [](const at::Tensor& x) { return x.norm(-1); }},
                            {"norm over rows", [](const at::Tensor& x) { return x.norm(2, {0}, true); }},
                            {"vector_norm", [](const at::Tensor& x) { return at::linalg_vector_norm(x); }},
                            {"vector_norm over columns",
                             [](const at::Tensor& x) { return at::linalg_vector_norm(x, 1.5, at::IntArrayRef{1}); }},
                            {"norm of stacked norms",
                             [](const at::Tensor& x) {
                               return at::stack({x.norm(), x.mul(2).norm()}).norm();
                             }},
                        })));
}

TEST_CASE("norms whose squares 16 bits do not hold", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(at::full({2, 4}, 300, at::kHalf), mesh, {Shard(1)});
    const auto of_rows = x.norm(2, {1});
    expect_equal(to_string(placements(of_rows)), to_string(Placements{NormPartial(2)}));
    expect_equal(full_tensor(x.norm()).item<double>(), at::full({}, 300 * std::sqrt(8), at::kHalf).item<double>());
    for (const auto& placement : {Placement(Replicate()), Placement(Shard(0))}) {
      const auto norms = redistribute(of_rows, {placement});
      expect_equal(full_tensor(norms).eq(600).all().item<bool>(), true);
      expect_equal(norms.scalar_type() == at::kHalf, true);
    }
  });
}

TEST_CASE("statistics over whole dims", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops(
      over({{5, 3}, {4, 2}},
           {
               {"var", [](const at::Tensor& x) { return x.var(); }},
               {"var over rows", [](const at::Tensor& x) { return at::var(x, at::IntArrayRef{0}, 0); }},
               {"std over columns", [](const at::Tensor& x) { return at::std(x, at::IntArrayRef{1}, 1, true); }},
               {"var_mean", [](const at::Tensor& x) { return std::get<1>(at::var_mean(x, at::IntArrayRef{0}, 1)); }},
               {"logsumexp", [](const at::Tensor& x) { return at::logsumexp(x, {0}); }},
               {"logsumexp over both",
                [](const at::Tensor& x) {
                  return at::logsumexp(x, at::IntArrayRef({0, 1}), true);
                }},
           })));
}

TEST_CASE("reductions over dims of no elements, and over no dims", "[dtensor][ops]") {
  const Functions statistics = {
      {"var", [](const at::Tensor& x) { return at::var(x, {1}, 1).isnan(); }},
      {"std", [](const at::Tensor& x) { return at::std(x, {1}, 0).isnan(); }},
      {"var_mean", [](const at::Tensor& x) { return std::get<0>(at::var_mean(x, {1}, 1)).isnan(); }},
      {"mean of var_mean", [](const at::Tensor& x) { return std::get<1>(at::var_mean(x, {1}, 1)).isnan(); }},
  };
  const Functions no_dims = {
      {"any", [](const at::Tensor& x) { return x.gt(0).any(at::IntArrayRef()); }},
      {"all", [](const at::Tensor& x) { return x.gt(0).all(at::IntArrayRef(), /*keepdim=*/true); }},
      {"any of bytes", [](const at::Tensor& x) { return x.gt(0).to(at::kByte).any(at::IntArrayRef()); }},
      {"any over all", [](const at::Tensor& x) { return x.gt(0).any(at::OptionalIntArrayRef()); }},
      {"sum", [](const at::Tensor& x) { return x.sum(at::IntArrayRef()); }},
      {"amax", [](const at::Tensor& x) { return x.amax(at::IntArrayRef()); }},
      {"norm", [](const at::Tensor& x) { return at::linalg_vector_norm(x, 2, at::IntArrayRef()); }},
  };
  auto cases = over({{4, 0}}, statistics);
  for (auto& test : over({{2, 2}, {5, 3}}, no_dims)) {
    cases.push_back(std::move(test));
  }
  for (auto& test : cases) {
    test.gradients = false;
  }
  CHECK_NOTHROW(check_ops(cases));
}

TEST_CASE("what a dim of no elements does not have is refused on every rank", "[dtensor][ops]") {
  run_ranks(3, [](int) {
    const auto x = distribute_tensor(at::ones({4, 0}), init_device_mesh(at::kCPU, {3}), {Shard(0)});
    expect_throws<ValueError>([&] { at::median(x, 1); }, "aten::median.dim: dim 1 of ");
    expect_throws<ValueError>([&] { at::nanmedian(x, 1); }, "has no elements");
    expect_throws<ValueError>([&] { at::mode(x, 1); }, "has no elements");
    TESSERA_EXPECT(std::get<0>(at::median(x, 0)).numel() == 0);
  });
}

TEST_CASE("variances of complex numbers are real", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto plain = at::complex(at::arange(6, at::kDouble), at::ones({6}, at::kDouble)).view({3, 2});
    const auto x = distribute_tensor(plain, mesh, {Shard(1)});
    const auto [variance, mean] = at::var_mean(x, at::IntArrayRef{0}, 1);
    const auto [plain_variance, plain_mean] = at::var_mean(plain, at::IntArrayRef{0}, 1);
    expect_equal(full_tensor(variance).equal(plain_variance), true);
    expect_equal(full_tensor(mean).equal(plain_mean), true);
    expect_equal(full_tensor(x.std()).equal(plain.std()), true);
  });
}

TEST_CASE("what reductions leave pending", "[dtensor][ops]") {
  const std::vector<std::pair<TensorFunction, Placement>> cases = {
      {[](const at::Tensor& x) { return x.sum(0); }, Partial()},
      {[](const at::Tensor& x) { return x.mean(); }, Partial()},
      {[](const at::Tensor& x) { return x.sum(1); }, Shard(0)},
      {[](const at::Tensor& x) { return x.amax({0}); }, Partial(ReduceOp::Max)},
      {[](const at::Tensor& x) {
         return x.amin({0, 1});
       },
       Partial(ReduceOp::Min)},
      {[](const at::Tensor& x) { return x.prod(); }, Partial(ReduceOp::Product)},
      {[](const at::Tensor& x) { return x.norm(); }, NormPartial(2)},
      {[](const at::Tensor& x) { return x.norm(1); }, Partial()},
      {[](const at::Tensor& x) { return x.norm(kInf); }, Partial(ReduceOp::Max)},
      {[](const at::Tensor& x) {
         return at::stack({x.norm(), x.norm()});
       },
       NormPartial(2)},
      {[](const at::Tensor& x) { return x.argmax(0); }, Shard(0)},  // columns are cut instead of rows
  };
  run_ranks(2, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(at::ones({5, 3}), mesh, {Shard(0)});
    for (const auto& [function, expected] : cases) {
      expect_equal(to_string(placements(function(x))), to_string(Placements{expected}));
    }
  });
}

}  // namespace tessera
