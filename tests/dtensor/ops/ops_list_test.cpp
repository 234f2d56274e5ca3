// Ops on lists of tensors: foreach and fused optimizer steps.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_abs.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_max.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_foreach_pow.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/_foreach_zero.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "base/error.h"
#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "dtensor/local/dtensor_impl.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/dtensor/op_oracle.h"
#include "tests/dtensor/test_values.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

/// Two tensors of each sizes, so that lists hold tensors of different sizes and placements.
std::vector<Input> two_lists() {
  return {{{5, 3}}, {{4}}, positive({5, 3}), positive({4})};
}

Tensors first(const Tensors& x) {
  return {x[0], x[1]};
}
Tensors second(const Tensors& x) {
  return {x[2], x[3]};
}

}  // namespace

TEST_CASE("foreach makes lists of results", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "add",
       .inputs = two_lists(),
       .call = [](const Tensors& x) { return at::_foreach_add(first(x), second(x), 0.5); }},
      {.name = "add of a number",
       .inputs = two_lists(),
       .call = [](const Tensors& x) { return at::_foreach_add(first(x), 2.0); }},
      {.name = "mul",
       .inputs = two_lists(),
       .call = [](const Tensors& x) { return at::_foreach_mul(first(x), second(x)); }},
      {.name = "div by numbers",
       .inputs = two_lists(),
       .call =
           [](const Tensors& x) {
             return at::_foreach_div(first(x), std::vector<at::Scalar>{2.0, 4.0});
           }},
      {.name = "sqrt", .inputs = two_lists(), .call = [](const Tensors& x) { return at::_foreach_sqrt(second(x)); }},
      {.name = "pow of a number",
       .inputs = two_lists(),
       .call = [](const Tensors& x) { return at::_foreach_pow(1.5, first(x)); }},
      {.name = "lerp",
       .inputs = two_lists(),
       .call = [](const Tensors& x) { return at::_foreach_lerp(first(x), second(x), 0.3); }},
      {.name = "addcdiv",
       .inputs = two_lists(),
       .call =
           [](const Tensors& x) {
             return at::_foreach_addcdiv(first(x), first(x), second(x), std::vector<at::Scalar>{0.5, 2.0});
           }},
      {.name = "mul by a tensor",
       .inputs = {{{5, 3}}, {{4}}, {{}}},
       .call = [](const Tensors& x) { return at::_foreach_mul(first(x), x[2]); },
       .gradients = false},
  }));
}

TEST_CASE("foreach reduces each tensor", "[dtensor][ops]") {
  std::vector<OpCase> cases;
  for (const double p : {0.0, 1.0, 2.0, 3.0, kInf}) {
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{5, 3}, std::vector<int64_t>{1, 2}}) {
      cases.push_back({.name = fmt::format("norm {}", p),
                       .inputs = {{sizes}, {{4}}},
                       .call = [p](const Tensors& x) { return at::_foreach_norm(x, p); },
                       .gradients = p == 2});
    }
  }
  cases.push_back({.name = "max",
                   .inputs = {{{5, 3}}, {{1, 2}}},
                   .call = [](const Tensors& x) { return at::_foreach_max(x); },
                   .gradients = false});
  CHECK_NOTHROW(check_ops(cases));
}

TEST_CASE("foreach addcdiv and addcmul by a tensor of numbers, plain or a DTensor", "[dtensor][ops]") {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const Tensors plain{at::arange(10, at::kFloat).view({5, 2}), at::arange(4, at::kFloat)};
    const auto numbers = at::tensor({0.5f, 2.0f});
    const auto whole = [](const Tensors& list) { return Tensors{full_tensor(list[0]), full_tensor(list[1])}; };
    const auto sharded = [&] {
      return Tensors{distribute_tensor(plain[0], mesh, {Shard(0)}), distribute_tensor(plain[1] + 1, mesh, {Shard(0)})};
    };
    const Tensors same{plain[0].clone(), plain[1] + 1};
    const auto expect_same = [](const Tensors& a, const Tensors& b) {
      expect_bit_equal(a[0], b[0]);
      expect_bit_equal(a[1], b[1]);
    };
    const auto ones = Tensors{at::full({5, 2}, 3.0), at::full({4}, 3.0)};
    const Tensors by{distribute_tensor(ones[0], mesh, {Shard(0)}), distribute_tensor(ones[1], mesh, {Replicate()})};
    for (const auto& scalars : {numbers, distribute_tensor(numbers, mesh, {Replicate()})}) {
      expect_same(whole(at::_foreach_addcdiv(sharded(), sharded(), by, scalars)),
                  at::_foreach_addcdiv(same, same, ones, numbers));
      expect_same(whole(at::_foreach_addcmul(sharded(), sharded(), by, scalars)),
                  at::_foreach_addcmul(same, same, ones, numbers));
      auto x = sharded();
      at::_foreach_addcdiv_(x, sharded(), by, scalars);
      expect_same(whole(x), at::_foreach_addcdiv(same, same, ones, numbers));
      x = sharded();
      at::_foreach_addcmul_(x, sharded(), by, scalars);
      expect_same(whole(x), at::_foreach_addcmul(same, same, ones, numbers));
    }
    expect_throws<ValueError>([&] { at::_foreach_addcmul_(sharded(), by, by, at::ones({3})); },
                              "a number for each of the 2 tensors");
  });
}

TEST_CASE("foreach in place keeps each tensor's placements", "[dtensor][ops]") {
  const auto in_place = [](const char* name, std::function<void(const Tensors&)> call) {
    return OpCase{.name = name,
                  .inputs = two_lists(),
                  .call =
                      [call](const Tensors& x) {
                        Tensors copies;
                        for (const auto& t : x) {
                          copies.push_back(t.clone());
                        }
                        call(copies);
                        return copies;
                      },
                  .gradients = false};
  };
  CHECK_NOTHROW(check_ops({
      in_place("add_", [](const Tensors& x) { at::_foreach_add_(first(x), second(x)); }),
      in_place("sub_", [](const Tensors& x) { at::_foreach_sub_(first(x), 1.5); }),
      in_place("mul_", [](const Tensors& x) { at::_foreach_mul_(first(x), second(x)); }),
      in_place("div_", [](const Tensors& x) { at::_foreach_div_(first(x), 3.0); }),
      in_place("abs_", [](const Tensors& x) { at::_foreach_abs_(first(x)); }),
      in_place("addcmul_", [](const Tensors& x) { at::_foreach_addcmul_(first(x), second(x), second(x), 0.1); }),
      in_place("copy_", [](const Tensors& x) { at::_foreach_copy_(first(x), second(x)); }),
      in_place("zero_", [](const Tensors& x) { at::_foreach_zero_(first(x)); }),
  }));
}

TEST_CASE("lists of differently cut tensors need no communication", "[dtensor][ops]") {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const Tensors x{distribute_tensor(at::ones({5, 2}), mesh, {Shard(0)}),
                    distribute_tensor(at::ones({4}), mesh, {Shard(0)}),
                    distribute_tensor(at::ones({2, 7}), mesh, {Shard(1)})};
    reset_comm_stats();
    at::_foreach_add_(x, x, 2.0);
    const auto norms = at::_foreach_norm(x, 2);
    expect_equal(comm_stats().calls(), 0);
    const auto total = at::stack(norms).norm();
    expect_equal(to_string(placements(x[2])), "(Shard(1))");
    expect_close(full_tensor(total), at::full({}, 3 * std::sqrt(28.f)));
    expect_equal(comm_stats().calls(), 1);
  });
}

namespace {

struct Optimizer {
  const char* name;
  /// One step on (parameters, gradients, first moments, second moments).
  std::function<void(const Tensors&, const Tensors&, const Tensors&, const Tensors&)> step;
};

Tensors ones_like_steps(size_t count) {
  return Tensors(count, at::full({}, 3.f));
}

std::vector<Optimizer> fused_optimizers() {
  return {
      {"adam",
       [](const Tensors& p, const Tensors& g, const Tensors& m, const Tensors& v) {
         at::_fused_adam_(p, g, m, v, {}, ones_like_steps(p.size()), 0.1, 0.9, 0.99, 0.01, 1e-8, false, false);
       }},
      {"adamw with amsgrad",
       [](const Tensors& p, const Tensors& g, const Tensors& m, const Tensors& v) {
         at::_fused_adamw_(p, g, m, v, at::_foreach_mul(v, 2.0), ones_like_steps(p.size()), 0.1, 0.9, 0.99, 0.01, 1e-8,
                           true, false);
       }},
      {"sgd", [](const Tensors& p, const Tensors& g, const Tensors& m,
                 const Tensors&) { at::_fused_sgd_(p, g, m, 0.01, 0.9, 0.1, 0.0, false, false, false); }},
  };
}

}  // namespace

TEST_CASE("fused optimizer steps, whatever lies where", "[dtensor][ops]") {
  const bool grad_mode = GENERATE(false, true);
  auto generator = make_generator(5);
  std::vector<Tensors> values(4);  // parameters, gradients, moments of [5, 3] and [2]
  for (auto& list : values) {
    list = {at::randn({5, 3}, generator), at::randn({2}, generator)};
  }
  values[3] = {values[3][0].square(), values[3][1].square()};
  const std::vector<std::vector<Placement>> layouts{{Shard(0), Shard(0), Shard(0), Shard(0)},
                                                    {Replicate(), Shard(0), Shard(0), Replicate()},
                                                    {Shard(0), Replicate(), Replicate(), Shard(0)},
                                                    {Shard(0), Partial(), Shard(0), Shard(0)}};
  for (const auto& optimizer : fused_optimizers()) {
    std::vector<Tensors> expected = values;
    for (auto& list : expected) {
      list = {list[0].clone(), list[1].clone()};
    }
    optimizer.step(expected[0], expected[1], expected[2], expected[3]);
    for (const auto& layout : layouts) {
      run_ranks(3, [&](int rank) {
        const auto mesh = init_device_mesh(at::kCPU, {3});
        std::vector<Tensors> x(4);
        for (size_t i = 0; i < 4; ++i) {
          for (const auto& value : values[i]) {
            x[i].push_back(layout[i].is_partial() ? from_local(rank == 0 ? value.clone() : value * 0, mesh, {Partial()})
                                                  : distribute_tensor(value.clone(), mesh, {layout[i]}));
          }
        }
        reset_comm_stats();
        {
          const c10::AutoGradMode mode(grad_mode);
          optimizer.step(x[0], x[1], x[2], x[3]);
        }
        if (layout == layouts[0]) {
          expect_equal(comm_stats().calls(), 0);
        }
        for (const size_t i : {0, 2, 3}) {
          for (size_t k = 0; k < 2; ++k) {
            expect_equal(to_string(placements(x[i][k])), to_string(Placements{layout[i]}));
            expect_close(full_tensor(x[i][k]), expected[i][k]);
          }
        }
      });
    }
  }
}

TEST_CASE("a fused step of parameters on several meshes; it counts as one write", "[dtensor][ops]") {
  const bool grad_mode = GENERATE(false, true);
  auto generator = make_generator(6);
  const Tensors values{at::randn({5, 3}, generator), at::randn({3}, generator)};
  const Tensors slopes{at::randn({5, 3}, generator), at::randn({3}, generator)};
  const Tensors expected{values[0].clone(), values[1].clone()};
  const Tensors momenta{at::zeros({5, 3}), at::zeros({3})};
  at::_fused_sgd_(expected, slopes, momenta, 0.01, 0.9, 0.1, 0.0, false, false, true);
  run_ranks(4, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    const auto tp = mesh["tp"];
    const auto place = [&](const Tensors& x) {
      return Tensors{distribute_tensor(x[0].clone(), mesh, {Shard(0), Shard(1)}),
                     distribute_tensor(x[1].clone(), tp, {Shard(0)})};
    };
    const auto params = place(values), grads = place(slopes), states = place({at::zeros({5, 3}), at::zeros({3})});
    const auto& shard = dtensor_meta(params[0])->local;
    const auto version = params[0]._version(), shard_version = shard._version();
    const c10::AutoGradMode mode(grad_mode);
    at::_fused_sgd_(params, grads, states, 0.01, 0.9, 0.1, 0.0, false, false, true);
    expect_equal(params[0]._version(), version + 1);
    expect_equal(shard._version(), shard_version + 1);
    for (size_t i = 0; i < params.size(); ++i) {
      expect_bit_equal(full_tensor(params[i]), expected[i]);
    }
    // A gradient that is no DTensor, or none of this shape, is refused as before.
    expect_throws<ValueError>(
        [&] { at::_fused_sgd_(params, slopes, states, 0.01, 0.9, 0.1, 0.0, false, false, false); },
        "DTensors and plain tensors are mixed");
  });
}

TEST_CASE("a fused step writes parameters that require grad, in either mode, as it does plain ones", "[dtensor][ops]") {
  const bool grad_mode = GENERATE(false, true);
  const auto step = [=](const at::Tensor& param, const at::Tensor& grad) {
    const c10::AutoGradMode mode(grad_mode);
    at::_fused_sgd_({param}, {grad}, {}, 0.0, 0.0, 0.5, 0.0, false, false, true);
  };
  const auto plain = at::full({5}, 1.0).requires_grad_(true);
  step(plain, at::full({5}, 2.0));
  run_ranks(2, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto param = distribute_tensor(at::full({5}, 1.0), mesh, {Shard(0)}).requires_grad_(true);
    step(param, distribute_tensor(at::full({5}, 2.0), mesh, {Shard(0)}));
    expect_bit_equal(full_tensor(param.detach()), plain.detach());
  });
}

TEST_CASE("a fused step counts as a write of gradients where it scales them", "[dtensor][ops]") {
  run_ranks(2, [&](int) {
    const at::NoGradGuard no_grad;
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto shard = [&](double value) { return distribute_tensor(at::full({5}, value), mesh, {Shard(0)}); };
    const auto param = shard(1.0), grad = shard(2.0);
    const auto version = grad._version(), local_version = dtensor_meta(grad)->local._version();
    const auto step = [&](const std::optional<at::Tensor>& grad_scale) {
      at::_fused_sgd_({param}, {grad}, {}, 0.0, 0.0, 0.5, 0.0, false, false, true, grad_scale);
    };
    step(std::nullopt);
    expect_equal(grad._version(), version);
    step(at::full({}, 4.0));
    expect_equal(grad._version(), version + 1);
    expect_equal(dtensor_meta(grad)->local._version(), local_version + 1);
    expect_bit_equal(full_tensor(grad), at::full({5}, 0.5));
    expect_bit_equal(full_tensor(param), at::full({5}, -0.25));  // 1 - 0.5 * 2 - 0.5 * 2 / 4
  });
}

}  // namespace tessera
