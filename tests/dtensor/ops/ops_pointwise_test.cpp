#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/frexp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/hardtanh.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/log_sigmoid_backward.h>
#include <ATen/ops/log_sigmoid_forward.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/prelu.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/tanh_backward.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/ops/where.h>

#include <limits>

#include "comm/context/comm_stats.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/dtensor/op_oracle.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

std::vector<OpCase> unary_cases() {
  const std::vector<std::pair<const char*, std::function<at::Tensor(const at::Tensor&)>>> functions = {
      {"exp", [](const at::Tensor& x) { return x.exp(); }},
      {"log of positive", [](const at::Tensor& x) { return x.square().add(1).log(); }},
      {"relu", [](const at::Tensor& x) { return x.relu(); }},
      {"gelu", [](const at::Tensor& x) { return at::gelu(x); }},
      {"gelu tanh", [](const at::Tensor& x) { return at::gelu(x, "tanh"); }},
      {"silu", [](const at::Tensor& x) { return at::silu(x); }},
      {"sigmoid", [](const at::Tensor& x) { return x.sigmoid(); }},
      {"tanh", [](const at::Tensor& x) { return x.tanh(); }},
      {"softplus", [](const at::Tensor& x) { return at::softplus(x); }},
      {"elu", [](const at::Tensor& x) { return at::elu(x); }},
      {"mish", [](const at::Tensor& x) { return at::mish(x); }},
      {"leaky_relu", [](const at::Tensor& x) { return at::leaky_relu(x, 0.1); }},
      {"hardswish", [](const at::Tensor& x) { return at::hardswish(x); }},
      {"hardtanh", [](const at::Tensor& x) { return at::hardtanh(x, -0.5, 0.5); }},
      {"clamp", [](const at::Tensor& x) { return x.clamp(-0.5, 0.5); }},
      {"pow", [](const at::Tensor& x) { return x.pow(3); }},
      {"rsqrt", [](const at::Tensor& x) { return (x * x + 1).rsqrt(); }},
      {"neg, scalars", [](const at::Tensor& x) { return 2 - (-x) / 3 * 2 + 1; }},
      {"booleans as numbers", [](const at::Tensor& x) { return x.gt(0).to(at::kDouble) * x; }},
      {"clone, alias", [](const at::Tensor& x) { return x.clone().view_as(x).contiguous(); }},
      {"isnan", [](const at::Tensor& x) { return at::isnan(x); }},
      {"comparison", [](const at::Tensor& x) { return x.gt(0).logical_and(x.lt(1)); }},
      {"constants", [](const at::Tensor& x) { return at::full_like(x, 3) + x.new_ones({1}) + x.mul(0); }},
  };
  std::vector<OpCase> cases;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{5, 3}, {1, 2}, {}}) {
    for (const auto& [name, function] : functions) {
      cases.push_back({.name = name, .inputs = {{sizes}}, .call = [function = function](const Tensors& x) -> Tensors {
                         return {function(x[0])};
                       }});
    }
  }
  return cases;
}

std::vector<OpCase> binary_cases() {
  const std::vector<std::pair<const char*, std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>>> functions =
      {
          {"add", [](const at::Tensor& a, const at::Tensor& b) { return a.add(b, 2); }},
          {"sub", [](const at::Tensor& a, const at::Tensor& b) { return a - b; }},
          {"rsub", [](const at::Tensor& a, const at::Tensor& b) { return at::rsub(a, b); }},
          {"mul", [](const at::Tensor& a, const at::Tensor& b) { return a * b; }},
          {"div", [](const at::Tensor& a, const at::Tensor& b) { return a / (b * b + 1); }},
          {"maximum", [](const at::Tensor& a, const at::Tensor& b) { return at::maximum(a, b); }},
          {"where", [](const at::Tensor& a, const at::Tensor& b) { return at::where(a.gt(b), a, b * 2); }},
          {"lerp", [](const at::Tensor& a, const at::Tensor& b) { return at::lerp(a, b, 0.3); }},
          {"atan2", [](const at::Tensor& a, const at::Tensor& b) { return a.atan2(b); }},
          {"floor_divide",
           [](const at::Tensor& a, const at::Tensor& b) { return at::floor_divide(a.detach(), b.detach().abs() + 1); }},
      };
  const std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>> sizes = {
      {{5, 3}, {5, 3}}, {{5, 3}, {3}}, {{5, 1}, {1, 3}}, {{2, 1, 3}, {4, 1}}, {{5, 3}, {}}};
  std::vector<OpCase> cases;
  for (const auto& [left, right] : sizes) {
    for (const auto& [name, function] : functions) {
      cases.push_back({.name = name,
                       .inputs = {{left}, {right}},
                       .call = [function = function](const Tensors& x) -> Tensors { return {function(x[0], x[1])}; }});
    }
  }
  return cases;
}

}  // namespace

TEST_CASE("functions of one tensor", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops(unary_cases()));
}

TEST_CASE("functions of two tensors, broadcast", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops(binary_cases()));
}

TEST_CASE("functions of three tensors", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "addcmul",
       .inputs = {{{5, 3}}, {{3}}, {{5, 1}}},
       .call = [](const Tensors& x) -> Tensors { return {at::addcmul(x[0], x[1], x[2], 0.5)}; }},
      {.name = "where with a mask",
       .inputs = {mask({5, 3}), {{5, 3}}, {{1, 3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::where(x[0], x[1], x[2])}; }},
      {.name = "masked_fill",
       .inputs = {{{5, 3}}, mask({5, 1})},
       .call = [](const Tensors& x) -> Tensors { return {x[0].masked_fill(x[1], -2)}; }},
      {.name = "maximum.out",
       .inputs = {{{5, 3}}, {{5, 3}}},
       .call = [](const Tensors& x) -> Tensors {
         auto out = at::empty_like(x[0]);
         at::maximum_out(out, x[0], x[1]);
         return {out};
       },
       .in_place = true,
       .gradients = false},
      {.name = "prelu",
       .inputs = {{{2, 3, 4}}, {{3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::prelu(x[0], x[1])}; }},
  }));
}

TEST_CASE("functions that meta tensors do not have", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto plain = at::arange(3, at::kFloat);
    const auto [mantissa, exponent] = at::frexp(distribute_tensor(plain, mesh, {Shard(0)}));
    expect_equal(full_tensor(mantissa).equal(std::get<0>(at::frexp(plain))), true);
    expect_equal(full_tensor(exponent).equal(std::get<1>(at::frexp(plain))), true);
    const auto numbers = at::complex(plain, plain);
    auto conjugates = distribute_tensor(numbers, mesh, {Shard(0)});
    conjugates.conj_physical_();
    expect_equal(full_tensor(conjugates).equal(at::complex(plain, -plain)), true);
  });
}

TEST_CASE("pending integers, which may wrap, are summed before they are added to floats", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto floats = from_local(at::full({3}, 1, at::kFloat), mesh, {Partial()});
    const auto bytes = from_local(at::full({3}, 100, at::kChar), mesh, {Partial()});
    expect_equal(full_tensor(floats + bytes).eq(2 + int8_t(200)).all().item<bool>(), true);
  });
}

/// The finite call of each pair comes first: its plan, in which terms are kept, must not serve the other.
TEST_CASE("pending sums by which numbers make infinities", "[dtensor][ops]") {
  constexpr double inf = std::numeric_limits<double>::infinity();
  CHECK_NOTHROW(check_ops({
      {.name = "times infinity, over zero",
       .inputs = {{{5, 3}}},
       .call = [](const Tensors& x) -> Tensors {
         return {x[0] * 2., x[0] * inf, x[0] / 2., x[0] / 0., x[0] / 0, x[0] * 0.};
       },
       .gradients = false},
      {.name = "lists",
       .inputs = {{{5, 3}}, {{4}}},
       .call = [](const Tensors& x) -> Tensors {
         Tensors results;
         for (const auto& scaled : {at::_foreach_mul(x, 2.), at::_foreach_mul(x, inf), at::_foreach_div(x, 2.),
                                    at::_foreach_div(x, 0.), at::_foreach_div(x, {at::Scalar(2.), at::Scalar(0.)})}) {
           results.insert(results.end(), scaled.begin(), scaled.end());
         }
         return results;
       },
       .gradients = false},
      {.name = "added times infinity",
       .inputs = {{{5, 3}}, {{5, 3}}},
       .call = [](const Tensors& x) -> Tensors {
         return {x[0].add(x[1], 2.), x[0].add(x[1], inf)};
       },
       .gradients = false},
  }));
}

TEST_CASE("gradients of gates are computed by one kernel, as on one device", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto generator = make_generator(3);
    const auto value = at::randn({64, 3}, generator).to(at::kBFloat16),
               grad = at::randn({64, 3}, generator).to(at::kBFloat16);
    for (const auto gate :
         {+[](const at::Tensor& x) { return at::silu(x); }, +[](const at::Tensor& x) { return at::mish(x); }}) {
      const auto whole = value.clone().requires_grad_();
      gate(whole).backward(grad);
      const auto x = distribute_tensor(value, mesh, {Shard(0)}).requires_grad_();
      gate(x).backward(distribute_tensor(grad, mesh, {Shard(0)}));
      expect_bit_equal(full_tensor(x.grad()), whole.grad());
    }
  });
}

TEST_CASE("gradients that are pending sums stay so", "[dtensor][ops]") {
  const std::vector<std::pair<const char*, std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>>> functions =
      {{"threshold_backward", [](auto& grad, auto& x) { return at::threshold_backward(grad, x, 0); }},
       {"gelu_backward", [](auto& grad, auto& x) { return at::gelu_backward(grad, x); }},
       {"silu_backward", [](auto& grad, auto& x) { return at::silu_backward(grad, x); }},
       {"tanh_backward", [](auto& grad, auto& x) { return at::tanh_backward(grad, x); }},
       {"log_sigmoid_backward", [](auto& grad, auto& x) {
          return at::log_sigmoid_backward(grad, x, std::get<1>(at::log_sigmoid_forward(x)));
        }}};
  for (const auto& [name, function] : functions) {
    CHECK_NOTHROW(check_op({.name = name,
                            .inputs = {{{5, 3}}, {{5, 3}}},
                            .call = [f = function](const Tensors& x) -> Tensors { return {f(x[0], x[1])}; },
                            .gradients = false}));
    run_ranks(2, [&, f = function](int) {
      const auto mesh = init_device_mesh(at::kCPU, {2});
      const auto x = at::randn({4}, make_generator(1));
      expect_equal(to_string(placements(f(place(x, mesh, {Partial()}), place(x, mesh, {Replicate()})))),
                   "(Partial(Sum))");
    });
  }
}

TEST_CASE("log_sigmoid, whose kernels leave a buffer for backward, is computed where its parts lie", "[dtensor][ops]") {
  std::vector<OpCase> cases;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{5, 3}, {1}, {}, {2, 0}}) {
    cases.push_back({.name = "log_sigmoid", .inputs = {{sizes}}, .call = [](const Tensors& x) -> Tensors {
                       return {at::log_sigmoid(x[0])};
                     }});
  }
  cases.push_back({.name = "log_sigmoid of columns", .inputs = {{{5, 3}}}, .call = [](const Tensors& x) -> Tensors {
                     return {at::log_sigmoid(x[0].t())};
                   }});
  CHECK_NOTHROW(check_ops(cases));
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const auto x = place(at::randn({2, 4}, make_generator(1)), mesh, {Shard(0)}).requires_grad_();
    reset_comm_stats();
    const auto y = at::log_sigmoid(x);
    y.backward(place(at::ones({2, 4}), mesh, {Shard(0)}));
    expect_equal(comm_stats().calls(), 0);
    expect_equal(to_string(placements(y)) + to_string(placements(x.grad())), "(Shard(0))(Shard(0))");
  });
}

}  // namespace tessera
