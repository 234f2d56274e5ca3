// Pointwise ops in place (ops_pointwise_test.cpp has the others), on tensors that stay where they are and that move.

#include <ATen/TensorOperators.h>

#include <algorithm>
#include <functional>

#include "base/error.h"
#include "testing/expect.h"
#include "tests/dtensor/op_oracle.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

std::vector<OpCase> in_place_cases() {
  const std::vector<std::pair<const char*, std::function<void(at::Tensor&, const at::Tensor&)>>> functions = {
      {"add_", [](at::Tensor& a, const at::Tensor& b) { a.add_(b, 2); }},
      {"sub_", [](at::Tensor& a, const at::Tensor& b) { a.sub_(b); }},
      {"mul_", [](at::Tensor& a, const at::Tensor& b) { a.mul_(b); }},
      {"div_", [](at::Tensor& a, const at::Tensor& b) { a.div_(b * b + 1); }},
      {"addcmul_", [](at::Tensor& a, const at::Tensor& b) { a.addcmul_(b, b, 0.5); }},
      {"addcdiv_", [](at::Tensor& a, const at::Tensor& b) { a.addcdiv_(b, b * b + 1, 0.5); }},
      {"lerp_", [](at::Tensor& a, const at::Tensor& b) { a.lerp_(b.expand_as(a), 0.25); }},
      {"copy_", [](at::Tensor& a, const at::Tensor& b) { a.copy_(b); }},
      {"masked_fill_", [](at::Tensor& a, const at::Tensor& b) { a.masked_fill_(b.gt(0), 7); }},
      {"add_ of a number", [](at::Tensor& a, const at::Tensor&) { a.add_(0.5).mul_(2); }},
      {"zero_", [](at::Tensor& a, const at::Tensor&) { a.zero_(); }},
      {"clamp_", [](at::Tensor& a, const at::Tensor&) { a.clamp_(-1, 1); }},
      {"relu_", [](at::Tensor& a, const at::Tensor&) { a.relu_(); }},
  };
  std::vector<OpCase> cases;
  for (const auto& [left, right] : std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>>{
           {{5, 3}, {5, 3}}, {{5, 3}, {3}}, {{1, 3}, {1}}}) {
    for (const auto& [name, function] : functions) {
      cases.push_back({.name = name,
                       .inputs = {{left}, {right}},
                       .call = [function = function](const Tensors& x) -> Tensors {
                         auto written = x[0].clone();
                         function(written, x[1]);
                         return {written};
                       },
                       .in_place = true});
    }
  }
  return cases;
}

}  // namespace

TEST_CASE("an in-place op that is refused on copies, or wherever a tensor is cut, does not pass", "[dtensor][ops]") {
  const auto refused_where = [](const std::function<bool(const Placement&)>& is_refused) -> OpCase {
    return {.name = "refused",
            .inputs = {{{5, 3}}},
            .call = [is_refused](const Tensors& x) -> Tensors {
              if (is_dtensor(x[0]) && std::ranges::any_of(placements(x[0]), is_refused)) {
                throw NotImplementedError("not here");
              }
              return {x[0] * 1};
            },
            .in_place = true};
  };
  const auto on_copies = refused_where([](const Placement& placement) { return placement.is_replicate(); });
  expect_throws<std::exception>([&] { check_op(on_copies); }, "refused on copies");
  const auto where_cut = refused_where([](const Placement& placement) { return placement.is_shard(); });
  expect_throws<std::exception>([&] { check_op(where_cut); }, "refused wherever a tensor is cut");
  check_op(refused_where([](const Placement& placement) { return placement.is_shard(1); }));
}

TEST_CASE("in-place functions", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops(in_place_cases()));
}

}  // namespace tessera
