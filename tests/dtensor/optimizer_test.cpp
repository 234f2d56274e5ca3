// Stock optimizers and gradient clipping on DTensor parameters: ten steps equal those on plain ones.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <limits>

#include "comm/context/comm_stats.h"
#include "dtensor/dispatch/dispatch.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

using Parameters = std::vector<at::Tensor>;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const Parameters&)>;

constexpr uint64_t kProblemSeed = 7;

struct Problem {
  Parameters parameters;  // [17, 5], [17], [3, 17], [3]
  at::Tensor input, target;

  Problem() {
    auto generator = make_generator(kProblemSeed);
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{17, 5}, {17}, {3, 17}, {3}}) {
      parameters.push_back(at::randn(sizes, generator));
    }
    input = at::randn({8, 5}, generator);
    target = at::randn({8, 3}, generator);
  }
};

void backward(const Parameters& p, const at::Tensor& input, const at::Tensor& target) {
  const auto hidden = at::linear(input, p[0], p[1]).tanh();
  (at::linear(hidden, p[2], p[3]) - target).square().mean().backward();
}

Parameters leaves(const Parameters& values) {
  Parameters result;
  for (const auto& value : values) {
    result.push_back(value.clone().set_requires_grad(true));
  }
  return result;
}

void train(const Parameters& p, const at::Tensor& input, const at::Tensor& target, const MakeOptimizer& make) {
  const auto optimizer = make(p);
  for (int step = 0; step < 10; ++step) {
    optimizer->zero_grad();
    backward(p, input, target);
    optimizer->step();
  }
}

Parameters distributed(const Parameters& values, const DeviceMesh& mesh, const Placements& placements) {
  Parameters result;
  for (const auto& value : values) {
    result.push_back(distribute_tensor(value, mesh, placements).set_requires_grad(true));
  }
  return result;
}

void check_optimizer(const MakeOptimizer& make) {
  const Problem problem;
  const auto expected = leaves(problem.parameters);
  train(expected, problem.input, problem.target, make);
  for (const auto& shape : std::vector<std::vector<int64_t>>{{2}, {3}, {4}, {2, 2}}) {
    run_ranks(static_cast<int>(c10::multiply_integers(shape)), [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, shape);
      Placements cut(shape.size(), Shard(0));
      const auto p = distributed(problem.parameters, mesh, cut);
      train(p, distribute_tensor(problem.input, mesh, cut), distribute_tensor(problem.target, mesh, cut), make);
      for (size_t i = 0; i < p.size(); ++i) {
        expect_equal(to_string(placements(p[i])), to_string(cut));
        expect_close(full_tensor(p[i].detach()), expected[i].detach(), {.rtol = 1e-4, .atol = 1e-5});
      }
    });
  }
}

template <class Optimizer, class Options>
MakeOptimizer with(Options options) {
  return [=](const Parameters& p) -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<Optimizer>(p, options);
  };
}

}  // namespace

TEST_CASE("SGD", "[dtensor][optim]") {
  check_optimizer(with<torch::optim::SGD>(torch::optim::SGDOptions(0.1)));
  check_optimizer(with<torch::optim::SGD>(torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01)));
  check_optimizer(with<torch::optim::SGD>(torch::optim::SGDOptions(0.05).momentum(0.9).nesterov(true)));
}

TEST_CASE("Adam and AdamW", "[dtensor][optim]") {
  check_optimizer(with<torch::optim::Adam>(torch::optim::AdamOptions(0.01).weight_decay(0.1)));
  check_optimizer(with<torch::optim::Adam>(torch::optim::AdamOptions(0.01).amsgrad(true)));
  check_optimizer(with<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01)));
  check_optimizer(with<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01).amsgrad(true)));
}

TEST_CASE("RMSprop and Adagrad", "[dtensor][optim]") {
  check_optimizer(with<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.01)));
  check_optimizer(with<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.01).centered(true).momentum(0.5)));
  check_optimizer(with<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.05).lr_decay(0.1)));
}

TEST_CASE("an optimizer built before its parameters became DTensors steps them", "[dtensor][optim]") {
  const Problem problem;
  const auto make = with<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01));
  const auto expected = leaves(problem.parameters);
  train(expected, problem.input, problem.target, make);
  run_ranks(3, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const auto p = leaves(problem.parameters);
    const auto optimizer = make(p);
    for (size_t i = 0; i < p.size(); ++i) {
      p[i].set_data(distribute_tensor(problem.parameters[i], mesh, {Shard(0)}));
    }
    const auto input = distribute_tensor(problem.input, mesh, {Shard(0)});
    const auto target = distribute_tensor(problem.target, mesh, {Shard(0)});
    for (int step = 0; step < 10; ++step) {
      optimizer->zero_grad();
      backward(p, input, target);
      optimizer->step();
    }
    for (size_t i = 0; i < p.size(); ++i) {
      expect_close(full_tensor(p[i].detach()), expected[i].detach(), {.rtol = 1e-4, .atol = 1e-5});
    }
  });
}

namespace {

/// DTensor parameters whose gradients are given and cut like them.
Parameters with_gradients(const Parameters& values, const DeviceMesh& mesh, const Placements& placements) {
  auto result = distributed(values, mesh, placements);
  for (size_t i = 0; i < result.size(); ++i) {
    result[i].mutable_grad() = distribute_tensor(values[i].sin(), mesh, placements);
  }
  return result;
}

}  // namespace

TEST_CASE("clip_grad_norm_ gives the global norm for one all-reduce", "[dtensor][optim]") {
  const Problem problem;
  for (const double type : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    auto expected = leaves(problem.parameters);
    for (auto& p : expected) {
      p.mutable_grad() = p.detach().sin();
    }
    const double expected_norm = torch::nn::utils::clip_grad_norm_(expected, 0.5, type);
    for (const int ranks : {2, 3, 4}) {
      run_ranks(ranks, [&](int) {
        const auto mesh = init_device_mesh(at::kCPU, {ranks});
        const auto p = with_gradients(problem.parameters, mesh, {Shard(0)});
        reset_comm_stats();
        const double norm = torch::nn::utils::clip_grad_norm_(p, 0.5, type);
        expect_equal(comm_stats().calls(), 1);
        expect_equal(comm_stats()[Collective::AllReduce].calls, 1);
        TESSERA_EXPECT(std::abs(norm - expected_norm) < 1e-5 * expected_norm);
        for (size_t i = 0; i < p.size(); ++i) {
          expect_close(full_tensor(p[i].grad()), expected[i].grad());
        }
      });
    }
  }
}

TEST_CASE("clip_grad_norm_ over gradients cut in different ways", "[dtensor][optim]") {
  const Problem problem;
  auto expected = leaves(problem.parameters);
  for (auto& p : expected) {
    p.mutable_grad() = p.detach().sin();
  }
  const double expected_norm = torch::nn::utils::clip_grad_norm_(expected, 0.5);
  run_ranks(4, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2});
    auto p = with_gradients(problem.parameters, mesh, {Shard(0), Shard(0)});
    p[1].mutable_grad() = distribute_tensor(problem.parameters[1].sin(), mesh, {Replicate(), Shard(0)});
    p[2].mutable_grad() = distribute_tensor(problem.parameters[2].sin(), mesh, {Shard(0), Shard(1)});
    p[3].mutable_grad() = distribute_tensor(problem.parameters[3].sin(), mesh, {Replicate(), Replicate()});
    const double norm = torch::nn::utils::clip_grad_norm_(p, 0.5);
    TESSERA_EXPECT(std::abs(norm - expected_norm) < 1e-5 * expected_norm);
    for (size_t i = 0; i < p.size(); ++i) {
      expect_close(full_tensor(p[i].grad()), expected[i].grad());
    }
  });
}

TEST_CASE("clip_grad_value_", "[dtensor][optim]") {
  const Problem problem;
  run_ranks(3, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const auto p = with_gradients(problem.parameters, mesh, {Shard(0)});
    torch::nn::utils::clip_grad_value_(p, 0.1);
    for (size_t i = 0; i < p.size(); ++i) {
      expect_bit_equal(full_tensor(p[i].grad()), problem.parameters[i].sin().clamp(-0.1, 0.1));
    }
  });
}

TEST_CASE("steps that differ in numbers only share plans", "[dtensor][optim]") {
  const Problem problem;
  const std::vector<MakeOptimizer> optimizers{
      with<torch::optim::SGD>(torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01)),
      with<torch::optim::Adam>(torch::optim::AdamOptions(0.01).weight_decay(0.1).amsgrad(true)),
      with<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01)),
  };
  for (const auto& make : optimizers) {
    run_ranks(3, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {3});
      const auto p = with_gradients(problem.parameters, mesh, {Shard(0)});
      const auto optimizer = make(p);
      size_t misses = 0;
      for (int step = 0; step < 10; ++step) {
        for (auto& group : optimizer->param_groups()) {
          group.options().set_lr(0.01 / (1 + step));
        }
        optimizer->step();
        if (step == 1) {
          misses = dispatch_stats().cache_misses;
        }
      }
      TESSERA_EXPECT(misses > 0);
      expect_equal(dispatch_stats().cache_misses, misses);
    });
  }
}

TEST_CASE("a number that decides the result's layout or dtype has a plan of its own", "[dtensor][optim]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(at::arange(4, at::kFloat).sub_(2), mesh, {Shard(0)});
    for (const double p : {1.0, 2.0, 1.0}) {
      expect_close(full_tensor(at::norm(x, p)), full_tensor(x).norm(p));
    }
    const auto integers = x.to(at::kLong);
    expect_equal(integers.mul(2).scalar_type(), at::kLong);
    expect_equal(integers.mul(2.0).scalar_type(), at::kFloat);
    expect_equal(integers.mul(3.0).scalar_type(), at::kFloat);
    expect_bit_equal(full_tensor(x.mul(2.0)), full_tensor(x) * 2);
    expect_bit_equal(full_tensor(x.mul(3.0)), full_tensor(x) * 3);
    const auto pending = from_local(at::ones({2}), mesh, {Partial()});
    expect_bit_equal(full_tensor(pending.masked_fill(pending.ne(pending), 0.0)), at::full({2}, 2.f));
    expect_bit_equal(full_tensor(pending.masked_fill(pending.eq(pending), 5.0)), at::full({2}, 5.f));
  });
}

TEST_CASE("plans are those of the default dtype", "[dtensor][optim]") {
  run_ranks(1, [](int) {  // the dtype is one for all threads
    const auto mesh = init_device_mesh(at::kCPU, {1});
    const auto integers = distribute_tensor(at::arange(4, at::kLong), mesh, {Shard(0)});
    const auto before = c10::get_default_dtype();
    for (const auto dtype : {at::kFloat, at::kDouble, at::kFloat}) {
      c10::set_default_dtype(c10::scalarTypeToTypeMeta(dtype));
      const auto product = integers.mul(0.5);
      c10::set_default_dtype(before);
      expect_equal(product.scalar_type(), dtype);
      expect_equal(to_local(product).scalar_type(), dtype);
    }
  });
}

}  // namespace tessera
