// Random ops give the numbers that one device gives, whatever the placements and the number of ranks.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/normal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/randint_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/rrelu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "dtensor/random/random.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "testing/test_devices.h"
#include "tests/dtensor/op_oracle.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

constexpr uint64_t kDrawSeed = 11;

struct RandomCase {
  const char* name;
  std::function<at::Tensor(const at::Tensor&)> draw;
};

/// What an in-place op makes of a copy.
std::function<at::Tensor(const at::Tensor&)> filled(std::function<void(const at::Tensor&)> fill) {
  return [fill](const at::Tensor& x) {
    auto copy = x.clone();
    fill(copy);
    return copy;
  };
}

std::vector<RandomCase> random_cases() {
  return {
      {"normal_", filled([](const auto& x) { x.normal_(0.5, 2); })},
      {"uniform_", filled([](const auto& x) { x.uniform_(-1, 1); })},
      {"exponential_", filled([](const auto& x) { x.exponential_(1.5); })},
      {"bernoulli_", filled([](const auto& x) { x.bernoulli_(0.3); })},
      {"bernoulli_ of probabilities", filled([](const auto& x) { x.bernoulli_(x); })},
      {"random_", filled([](const auto& x) { x.random_(3, 100); })},
      {"geometric_", filled([](const auto& x) { x.geometric_(0.4); })},
      {"log_normal_", filled([](const auto& x) { x.log_normal_(); })},
      {"cauchy_", filled([](const auto& x) { x.cauchy_(); })},
      {"rand_like", [](const auto& x) { return at::rand_like(x); }},
      {"randn_like", [](const auto& x) { return at::randn_like(x); }},
      {"randint_like", [](const auto& x) { return at::randint_like(x, 50); }},
      {"bernoulli", [](const auto& x) { return at::bernoulli(x); }},
      {"bernoulli of one probability", [](const auto& x) { return at::bernoulli(x, 0.6); }},
      {"normal around means", [](const auto& x) { return at::normal(x, 0.1); }},
      {"multinomial", [](const auto& x) { return at::multinomial(x, 2); }},
      {"dropout", [](const auto& x) { return at::dropout(x, 0.3, true); }},
      {"native_dropout", [](const auto& x) { return std::get<0>(at::native_dropout(x, 0.3, true)); }},
      {"two draws",
       [](const auto& x) {
         at::rand_like(x);
         return at::rand_like(x);
       }},
  };
}

/// The generator of plain tensors. It belongs to this test alone while it draws.
void seed_process(c10::Device device) {
  auto generator = at::globalContext().defaultGenerator(device);
  generator.set_current_seed(kDrawSeed);
}

at::Tensor expected_of(const RandomCase& test, const at::Tensor& value) {
  seed_process(value.device());
  return test.draw(value);
}

/// A GPU's fused kernel has numbers of its own, in an order that depends on its launch (dtensor/random/random.h).
bool is_fused(const RandomCase& test, c10::Device device) {
  return !device.is_cpu() && std::string(test.name).find("dropout") != std::string::npos;
}

void check_placements(const RandomCase& test, const at::Tensor& value) {
  const auto expected = expected_of(test, value);
  for (const auto& shape : std::vector<std::vector<int64_t>>{{1}, {2}, {3}, {7}, {2, 2}}) {
    run_ranks(static_cast<int>(c10::multiply_integers(shape)), [&](int) {
      const auto mesh = init_device_mesh(value.device().type(), shape);
      for (const auto& placement : {Placement(Shard(0)), Placement(Shard(1)), Placement(Replicate())}) {
        const auto x = distribute_tensor(value, mesh, Placements(shape.size(), placement));
        manual_seed(kDrawSeed);
        const auto actual = test.draw(x);
        const auto difference = describe_difference(full_tensor(actual), expected, {});
        TESSERA_CHECK(ExpectationError, difference.empty(), "{} under {}: {}", test.name, to_string(placements(x)),
                      difference);
      }
    });
  }
}

}  // namespace

TEST_CASE("random ops are those of one device under all placements", "[dtensor][random]") {
  auto generator = make_generator(3);
  const auto value = at::rand({5, 17}, generator);
  for (const auto device : test_devices()) {
    for (const auto& test : random_cases()) {
      INFO(test.name << " on " << device);
      if (!is_fused(test, device)) {
        check_placements(test, value.to(device));
      }
    }
  }
}

TEST_CASE("dropout draws the same elements under all placements, on every device", "[dtensor][random]") {
  for (const auto device : test_devices()) {
    at::Tensor first;
    for (const int ranks : {1, 2, 3}) {
      run_ranks(ranks, [&](int) {
        const auto mesh = init_device_mesh(device.type(), {ranks});
        manual_seed(kDrawSeed);
        const auto x = distribute_tensor(at::ones({50, 3}, device), mesh, {Shard(0)});
        const auto dropped = full_tensor(at::dropout(x, 0.3, true));
        const auto zeros = dropped.eq(0).sum().item<int64_t>();
        TESSERA_EXPECT(20 < zeros && zeros < 70);
        if (ranks == 1) {
          first = dropped;
        }
        TESSERA_EXPECT(dropped.equal(first));
      });
    }
  }
}

TEST_CASE("drawing in place keeps placements and moves nothing", "[dtensor][random]") {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const auto x = distribute_tensor(at::ones({2, 4}), mesh, {Shard(0)});
    reset_comm_stats();
    x.normal_();
    expect_equal(to_string(placements(at::dropout(x, 0.5, true))), "(Shard(0))");
    expect_equal(comm_stats().calls(), 0);
    expect_equal(to_string(placements(x)), "(Shard(0))");
  });
}

TEST_CASE("a pending sum that is drawn anew holds the numbers once", "[dtensor][random]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto generator = make_generator(4);
    const auto x = from_local(at::ones({3}), mesh, {Partial()});
    x.normal_(0, 1, generator);
    expect_equal(to_string(placements(x)), "(Partial(Sum))");
    auto same = make_generator(4);
    expect_bit_equal(full_tensor(x), at::empty({3}).normal_(0, 1, same));
  });
}

TEST_CASE("each rank has generators of its own, which start alike", "[dtensor][random]") {
  run_ranks(3, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const auto x = distribute_tensor(at::ones({4}), mesh, {Replicate()});
    at::randn({rank + 1});
    const auto first = to_local(at::rand_like(x));
    expect_bit_equal(full_tensor(from_local(first, mesh, {Shard(0)})).view({3, 4}), first.expand({3, 4}));
    const auto state = dtensor_generator(at::kCPU).get_state();
    const auto second = to_local(at::rand_like(x));
    dtensor_generator(at::kCPU).set_state(state);
    expect_bit_equal(to_local(at::rand_like(x)), second);
    TESSERA_EXPECT(!second.equal(first));
  });
}

TEST_CASE("rrelu and its gradient, which needs the noise that the op writes", "[dtensor][random]") {
  const auto value = at::arange(-7, 8, at::kFloat).view({5, 3});
  const auto with_gradient = [](at::Tensor x) {
    x.requires_grad_();
    const auto y = at::rrelu(x, 0.1, 0.9, /*training=*/true);
    y.sum().backward();
    return std::pair(y.detach(), x.grad());
  };
  seed_process(at::kCPU);
  const auto [plain, plain_gradient] = with_gradient(value.clone());
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks});
      for (const auto& placement : {Placement(Shard(0)), Placement(Shard(1)), Placement(Replicate())}) {
        manual_seed(kDrawSeed);
        const auto [y, gradient] = with_gradient(distribute_tensor(value, mesh, {placement}));
        expect_bit_equal(full_tensor(y), plain);
        expect_bit_equal(full_tensor(gradient), plain_gradient);
        expect_close(full_tensor(gradient) * value, plain);
      }
    });
  }
}

TEST_CASE("dropout and its gradient", "[dtensor][random]") {
  const auto seeded = [](auto call) {
    return [call](const Tensors& x) -> Tensors {
      if (is_dtensor(x[0])) {
        manual_seed(kDrawSeed);
      } else {
        seed_process(at::kCPU);
      }
      return {call(x)};
    };
  };
  // A GPU's fused dropout of a plain tensor draws other numbers.
  CHECK_NOTHROW(check_ops({
      {.name = "dropout",
       .inputs = {{{5, 3}}},
       .call = seeded([](const Tensors& x) { return at::dropout(x[0], 0.4, true); }),
       .cpu_only = true},
      {.name = "attention with dropout",
       .inputs = {{{2, 2, 3, 4}}, {{2, 2, 3, 4}}, {{2, 2, 3, 4}}},
       .call = seeded([](const Tensors& x) { return at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.4); }),
       .cpu_only = true},
  }));
}

}  // namespace tessera
