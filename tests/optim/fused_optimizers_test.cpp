// The fused optimizers beside libtorch's own, on plain tensors and on shards.

#include "optim/fused_optimizers.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using Params = std::vector<at::Tensor>;

constexpr int kSteps = 6;
const std::vector<std::vector<int64_t>> kSizes{{5, 3}, {7}, {1, 2}, {0, 4}};

/// The same for every caller; parameter 1 has no gradient in the first two steps.
at::Tensor value_of(size_t param) {
  return at::randn(kSizes[param], make_generator(100 + param), at::kDouble);
}
at::Tensor grad_of(size_t param, int step) {
  const auto seed = static_cast<uint64_t>(1000 * step) + param;
  return param == 1 && step < 2 ? at::Tensor() : at::randn(kSizes[param], make_generator(seed), at::kDouble);
}

/// Makes an optimizer of two groups, of which the second has options of its own.
using Make = std::function<std::unique_ptr<Optimizer>(const Params& first, const Params& second)>;

template <class Own, class Options>
Make make(const Options& first, const Options& second) {
  return [=](const Params& a, const Params& b) {
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(a, std::make_unique<Options>(first));
    groups.emplace_back(b, std::make_unique<Options>(second));
    return std::make_unique<Own>(groups, first);
  };
}

struct Case {
  const char* name;
  Make stock, fused;
};

std::vector<Case> cases() {
  using torch::optim::AdamOptions, torch::optim::AdamWOptions, torch::optim::SGDOptions;
  const auto adam = AdamOptions(0.1).weight_decay(0.02), adam_2 = AdamOptions(0.05).betas({0.8, 0.95}).amsgrad(true);
  const auto adamw = AdamWOptions(0.1), adamw_2 = AdamWOptions(0.05).betas({0.8, 0.95}).amsgrad(true);
  const auto sgd = SGDOptions(0.1).momentum(0.9).dampening(0.1).weight_decay(0.02);
  const auto sgd_2 = SGDOptions(0.05).momentum(0.8).nesterov(true), sgd_plain = SGDOptions(0.2);
  return {{"adam", make<torch::optim::Adam>(adam, adam_2), make<optim::FusedAdam>(adam, adam_2)},
          {"adamw", make<torch::optim::AdamW>(adamw, adamw_2), make<optim::FusedAdamW>(adamw, adamw_2)},
          {"sgd", make<torch::optim::SGD>(sgd, sgd_2), make<optim::FusedSGD>(sgd, sgd_2)},
          {"sgd without momentum", make<torch::optim::SGD>(sgd_plain, sgd_2), make<optim::FusedSGD>(sgd_plain, sgd_2)}};
}

/// The parameters after some steps; `place` makes a parameter or gradient of a whole tensor. `twice`: one parameter of
/// each group is listed again.
Params train(const Make& make_optimizer, const std::function<at::Tensor(const at::Tensor&)>& place,
             bool twice = false) {
  Params params;
  for (size_t i = 0; i < kSizes.size(); ++i) {
    params.push_back(place(value_of(i)).requires_grad_(true));
  }
  Params first{params[0], params[1]}, second{params[2], params[3]};
  if (twice) {
    first.insert(first.end(), {params[0], params[0]});
    second.insert(second.begin(), params[2]);
  }
  const auto optimizer = make_optimizer(first, second);
  for (int step = 0; step < kSteps; ++step) {
    for (size_t i = 0; i < params.size(); ++i) {
      const auto grad = grad_of(i, step);
      params[i].mutable_grad() = grad.defined() ? place(grad) : at::Tensor();
    }
    optimizer->step();
  }
  return params;
}

at::Tensor plain(const at::Tensor& whole) {
  return whole.clone();
}

}  // namespace

TEST_CASE("fused optimizers give what libtorch's give, also of parameters that are listed several times") {
  const bool twice = GENERATE(false, true);
  for (const auto& [name, stock, fused] : cases()) {
    CAPTURE(name, twice);
    const auto expected = train(stock, plain, twice), actual = train(fused, plain, twice);
    for (size_t i = 0; i < expected.size(); ++i) {
      CHECK(at::allclose(actual[i], expected[i], /*rtol=*/1e-9, /*atol=*/1e-12));
    }
  }
}

TEST_CASE("fused optimizers step parameters that have gaps, or do not lie as their gradients do") {
  for (const auto& [name, stock, fused] : cases()) {
    CAPTURE(name);
    const auto expected = train(stock, plain);
    Params neighbours;
    const auto with_gaps = train(fused, [&](const at::Tensor& whole) {
      const auto pairs = at::stack({whole, whole}, /*dim=*/-1);
      neighbours.push_back(pairs.select(-1, 1));
      return pairs.select(-1, 0).detach();
    });
    size_t calls = 0;
    const auto transposed = train(fused, [&](const at::Tensor& whole) {
      return calls++ < kSizes.size() ? whole.t().contiguous().t() : whole.clone();
    });
    for (size_t i = 0; i < expected.size(); ++i) {
      CHECK(at::allclose(with_gaps[i], expected[i], /*rtol=*/1e-9, /*atol=*/1e-12));
      CHECK(at::equal(neighbours[i], value_of(i)));
      CHECK(at::allclose(transposed[i], expected[i], /*rtol=*/1e-9, /*atol=*/1e-12));
    }
  }
}

// Vector loops round their last elements otherwise, and shards end elsewhere.
TEST_CASE("fused optimizers step parameters that lie otherwise than gradients which have to move") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto whole = at::arange(24, at::kFloat).view({4, 6}).cos(), factors = at::arange(24, at::kFloat).view({6, 4});
    const auto run = [&](const at::Tensor& param, const at::Tensor& by) {
      optim::FusedAdamW optimizer({param}, torch::optim::AdamWOptions(0.1));
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        (param * by).sum().backward();
        optimizer.step();
      }
      return param.detach();
    };
    const auto plain = run(whole.clone().t().detach().requires_grad_(), factors);
    const auto param = distribute_tensor(whole, mesh, {Shard(0)}).t().detach().requires_grad_();
    expect_close(full_tensor(run(param, distribute_tensor(factors, mesh, {Replicate()}))), plain);
  });
}

TEST_CASE("a fused step reads gradients, also where it copies them to lie as its parameter, and writes none") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto whole = at::arange(24, at::kFloat).view({4, 6}).cos();
    const auto step = [](const at::Tensor& param, const at::Tensor& gradient) {
      param.mutable_grad() = gradient;
      const auto version = gradient._version();
      optim::FusedAdamW({param}, torch::optim::AdamWOptions(0.1)).step();
      expect_equal(gradient._version(), version);
      return param.detach();
    };
    const auto expected = step(whole.clone().requires_grad_(), at::ones({4, 6}));
    const auto shard = [&] { return distribute_tensor(whole, mesh, {Shard(0)}).requires_grad_(); };
    const auto expanded = from_local(at::ones({1, 1}).expand({2, 6}), mesh, {Shard(0)});
    const auto moved = distribute_tensor(at::ones({4, 6}), mesh, {Shard(1)});
    const auto pending = from_local(at::ones({4, 6}) / 2, mesh, {Partial()});
    for (const auto& gradient : {expanded, moved, pending}) {
      expect_close(full_tensor(step(shard(), gradient)), expected);
    }
    expect_bit_equal(to_local(pending), at::ones({4, 6}) / 2);
  });
}

// A kernel that goes through memory with gaps steps the neighbours and leaves the last elements as they are.
TEST_CASE("fused optimizers step shards whose memory has gaps, and leave the gaps as they are") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    for (const auto& [name, stock, fused] : cases()) {
      const auto expected = train(stock, plain);
      Params neighbours;
      const auto actual = train(fused, [&](const at::Tensor& whole) {
        const auto shard = to_local(distribute_tensor(whole, mesh, {Shard(0)}));
        const auto pairs = at::stack({shard, shard}, /*dim=*/-1);
        neighbours.push_back(pairs.select(-1, 1));
        return from_local(pairs.select(-1, 0), mesh, {Shard(0)},
                          {.shape = whole.sizes().vec(), .stride = whole.strides().vec()})
            .detach();
      });
      for (size_t i = 0; i < expected.size(); ++i) {
        expect_close(full_tensor(actual[i].detach()), expected[i].detach(), {.rtol = 1e-9, .atol = 1e-12});
        expect_bit_equal(neighbours[i], to_local(distribute_tensor(value_of(i), mesh, {Shard(0)})));
      }
      TESSERA_EXPECT(rank > 0 || !to_local(actual[0]).is_contiguous());
    }
  });
}

TEST_CASE("fused optimizers step plain tensors and DTensors of several meshes in one group") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"a", "b"});
    const auto values = [](const std::vector<int64_t>& sizes) { return at::ones(sizes, at::kDouble); };
    const std::vector<std::pair<DeviceMesh, std::vector<int64_t>>> places{
        {{}, {3}}, {mesh["a"], {}}, {mesh["b"], {5}}, {{}, {}}, {mesh["b"], {}}, {mesh, {5}}, {mesh["a"], {3}}};
    for (const auto& [name, stock, fused] : cases()) {
      Params expected, actual;
      for (const auto& [own, sizes] : places) {
        const auto place = [&, &own = own](const at::Tensor& whole) {
          const auto cut = whole.dim() == 0 ? Placement(Replicate()) : Placement(Shard(0));
          return own.defined() ? distribute_tensor(whole, own, Placements(own.ndim(), cut)) : whole.clone();
        };
        for (const bool is_placed : {false, true}) {
          const auto value = values(sizes), grad = values(sizes) * 2;
          auto& params = is_placed ? actual : expected;
          params.push_back((is_placed ? place(value) : value).requires_grad_());
          params.back().mutable_grad() = is_placed ? place(grad) : grad;
        }
      }
      const auto expected_optimizer = stock(expected, {}), optimizer = fused(actual, {});
      for (int step = 0; step < 2; ++step) {
        expected_optimizer->step();
        optimizer->step();
      }
      for (size_t i = 0; i < places.size(); ++i) {
        const auto own = actual[i].detach();
        expect_close(is_dtensor(own) ? full_tensor(own) : own, expected[i].detach(), {.rtol = 1e-9, .atol = 1e-12});
      }
    }
  });
}

TEST_CASE("fused optimizers give the same on shards but for rounding, without communication") {
  const int world_size = GENERATE(1, 2, 3, 4);
  run_ranks(world_size, [=](int) {
    const auto mesh = init_device_mesh(at::kCPU, {world_size});
    for (const auto& [name, stock, fused] : cases()) {
      const auto expected = train(fused, plain);
      reset_comm_stats();
      const auto actual = train(fused, [&](const at::Tensor& whole) {
        return distribute_tensor(whole, mesh, {Shard(0)}, {.src_data_rank = std::nullopt});
      });
      expect_equal(comm_stats().calls(), 0);
      for (size_t i = 0; i < expected.size(); ++i) {
        expect_close(full_tensor(actual[i].detach()), expected[i].detach(), {.rtol = 1e-12, .atol = 1e-12});
      }
    }
  });
}

TEST_CASE("a fused optimizer, built before or after fully_shard, trains as in one process") {
  const bool before = GENERATE(true, false);
  run_ranks(2, [=](int) {
    Tower reference, sharded;
    fill_parameters(*reference, 1);
    fill_parameters(*sharded, 1);
    optim::FusedAdamW reference_optimizer(reference->parameters(), torch::optim::AdamWOptions(0.01));
    std::unique_ptr<optim::FusedAdamW> optimizer;
    const auto make_optimizer = [&] {
      optimizer = std::make_unique<optim::FusedAdamW>(sharded->parameters(), torch::optim::AdamWOptions(0.01));
    };
    if (before) {
      make_optimizer();
    }
    shard_tower(sharded);
    if (!before) {
      make_optimizer();
    }
    for (int step = 0; step < 5; ++step) {
      const auto batch = make_batch(static_cast<uint64_t>(step), 3, 5);  // the same on all ranks
      reference_optimizer.zero_grad();
      weighted_loss(reference(batch)).backward();
      reference_optimizer.step();
      const auto closure = [&] {
        optimizer->zero_grad();
        auto loss = weighted_loss(sharded(batch));
        loss.backward();
        return loss;
      };
      TESSERA_EXPECT(optimizer->step(closure).defined());
      check_sharded_parity(reference, sharded);
    }
  });
}

TEST_CASE("a fused step of an element does not depend on where in its parameter the element lies") {
  constexpr int64_t kElements = 300;
  /// Cut into parameters of these sizes, in each of two groups.
  const auto train_cut = [](const Make& make_fused, const std::vector<int64_t>& sizes) {
    const auto cut = [&](uint64_t seed) {
      return at::randn({kElements}, make_generator(seed)).split_with_sizes(sizes);
    };
    std::vector<Params> groups;
    for (const uint64_t seed : {1, 2}) {
      auto& params = groups.emplace_back();
      for (const auto& part : cut(seed)) {
        params.push_back(part.clone().requires_grad_(true));
      }
    }
    const auto optimizer = make_fused(groups[0], groups[1]);
    for (uint64_t step = 0; step < kSteps; ++step) {
      for (size_t group = 0; group < groups.size(); ++group) {
        const auto grads = cut(10 + 2 * step + group);
        for (size_t i = 0; i < sizes.size(); ++i) {
          groups[group][i].mutable_grad() = grads[i].clone();
        }
      }
      optimizer->step();
    }
    return at::cat({at::cat(groups[0]), at::cat(groups[1])}).detach();
  };
  for (const auto& [name, stock, fused] : cases()) {
    INFO(name);
    const at::Tensor whole = train_cut(fused, {kElements});
    for (const auto& sizes : {std::vector<int64_t>{100, 100, 100}, {37, 1, 64, 5, 193}}) {
      CHECK(whole.equal(train_cut(fused, sizes)));
    }
  }
}

TEST_CASE("fused optimizers keep libtorch's state, and refuse gradients of another kind before they change anything") {
  const auto param = at::zeros({2}).requires_grad_(true), other = at::zeros({2}).requires_grad_(true);
  optim::FusedAdamW optimizer({param, other}, torch::optim::AdamWOptions(0.1));
  param.mutable_grad() = at::zeros({2}) + 1;
  optimizer.step();
  optimizer.step();
  const auto& state = static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
  CHECK(state.step() == 2);
  CHECK(optimizer.state().count(other.unsafeGetTensorImpl()) == 0);
  const auto value = param.detach().clone();
  other.mutable_grad() = at::zeros({2}).to_sparse();
  CHECK_THROWS_WITH(optimizer.step(), Catch::Matchers::Contains("parameter 1 of its group has a sparse gradient"));
  CHECK(state.step() == 2);
  CHECK(at::equal(param, value));
}

TEST_CASE("fused optimizers name the parameter that they cannot step by its place in its group") {
  const auto idle = at::zeros({2}).requires_grad_(), param = at::zeros({2}).requires_grad_();
  param.mutable_grad() = at::ones({2});
  const auto step_with = [&](const at::Tensor& other) {
    optim::FusedSGD({idle, param, other}, torch::optim::SGDOptions(0.1)).step();
  };
  using Catch::Matchers::Contains;
  const auto sparse = at::zeros({2}).requires_grad_();
  sparse.mutable_grad() = at::zeros({2}).to_sparse();
  CHECK_THROWS_WITH(step_with(sparse), Contains("parameter 2 of its group has a sparse gradient"));
  for (const auto dtype : {at::kComplexFloat, at::kComplexDouble}) {
    const auto complex = at::zeros({2}, dtype).requires_grad_();
    complex.mutable_grad() = at::ones({2}, dtype);
    CHECK_THROWS_AS(step_with(complex), NotImplementedError);
    CHECK_THROWS_WITH(step_with(complex),
                      Contains("parameter 2 of its group is Complex") && Contains("view_as_complex"));
  }
  CHECK(at::equal(param, at::zeros({2})));
}

TEST_CASE("what FusedSGD has stepped keeps its first momentum where another kind of parameter cannot be stepped") {
  const auto param = at::zeros({2}).requires_grad_(), expected = at::zeros({2}).requires_grad_();
  const auto impossible = at::zeros({2}, at::kMeta).requires_grad_();  // which has no fused kernel
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  optim::FusedSGD optimizer({param, impossible}, options);
  torch::optim::SGD stock({expected}, options);
  param.mutable_grad() = at::ones({2});
  expected.mutable_grad() = at::ones({2});
  impossible.mutable_grad() = at::ones({2}, at::kMeta);
  CHECK_THROWS_AS(optimizer.step(), c10::Error);
  stock.step();
  CHECK(at::equal(param, expected));
  impossible.mutable_grad() = at::Tensor();
  optimizer.step();
  stock.step();
  CHECK(at::allclose(param, expected));
}

}  // namespace tessera::testing
