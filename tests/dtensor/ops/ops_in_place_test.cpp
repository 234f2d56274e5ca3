// Pointwise ops in place (ops_pointwise_test.cpp has the others), on tensors that stay where they are and that move.

#include <ATen/TensorOperators.h>

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

TEST_CASE("in-place functions", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops(in_place_cases()));
}

}  // namespace tessera
