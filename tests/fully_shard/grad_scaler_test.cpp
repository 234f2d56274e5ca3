// Loss scaling over sharded gradients against one process, and how ranks skip a step together.

#include <ATen/TensorOperators.h>
#include <torch/optim/sgd.h>

#include <limits>

#include "dtensor/dtensor.h"
#include "optim/sharded_grad_scaler.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

torch::optim::SGD make_sgd(Tower& tower) {
  return torch::optim::SGD(tower->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
}

}  // namespace

TEST_CASE("scaled training equals one process without scaling, since the scale is a power of two", "[grad_scaler]") {
  const int world_size = GENERATE(1, 2, 3, 4);
  const auto [dim, hidden] = GENERATE(std::pair<int64_t, int64_t>{17, 13}, std::pair<int64_t, int64_t>{3, 2});
  run_ranks(world_size, [&, dim = dim, hidden = hidden](int rank) {
    Tower reference(dim, hidden), tower(dim, hidden);
    fill_parameters(*reference, 1);
    fill_parameters(*tower, 1);
    shard_tower(tower);
    auto reference_optimizer = make_sgd(reference), optimizer = make_sgd(tower);
    ShardedGradScaler scaler({.growth_interval = 2});
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      const auto loss = loss_of(tower, 10 * step + rank);
      const auto scaled = scaler.scale(loss);
      expect_equal(scaled.item<float>(), loss.item<float>() * static_cast<float>(scaler.get_scale()));
      scaled.backward();
      scaler.unscale_(optimizer);
      average_reference(*reference, world_size, [&](int r) { loss_of(reference, 10 * step + r).backward(); });
      check_sharded_parity(reference, tower, kExact);
      TESSERA_EXPECT(scaler.step(optimizer));
      scaler.update();
      reference_optimizer.step();
      check_sharded_parity(reference, tower, kExact);
      expect_equal(scaler.get_scale(), 65536.0 * (step < 1 ? 1 : step < 3 ? 2 : 4));
    }
  });
}

TEST_CASE("an overflow in the shard of one rank lets all skip the step", "[grad_scaler]") {
  const int world_size = GENERATE(2, 3, 4);
  const float bad = GENERATE(std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN());
  run_ranks(world_size, [&](int rank) {
    Tower tower;
    fill_parameters(*tower, 1);
    shard_tower(tower);
    auto optimizer = make_sgd(tower);
    ShardedGradScaler scaler({.init_scale = 8, .backoff_factor = 0.25});
    const auto before = full_tensor(tower->in->weight.detach()).clone();
    const auto train = [&](bool overflows) {
      optimizer.zero_grad();
      scaler.scale(loss_of(tower, rank)).backward();
      if (overflows && rank == world_size - 1) {
        to_local(tower->in->weight.grad()).view(-1)[0].fill_(bad);
      }
      const bool stepped = scaler.step(optimizer);
      scaler.update();
      return stepped;
    };
    TESSERA_EXPECT(!train(/*overflows=*/true));
    expect_bit_equal(full_tensor(tower->in->weight.detach()), before);
    expect_equal(scaler.get_scale(), 2.0);
    TESSERA_EXPECT(train(/*overflows=*/false));
    TESSERA_EXPECT(!full_tensor(tower->in->weight.detach()).equal(before));
    expect_equal(scaler.get_scale(), 2.0);
  });
}

TEST_CASE("ranks without gradients take part; parameters may be plain", "[grad_scaler]") {
  run_ranks(2, [](int rank) {
    auto param = at::zeros({3}).requires_grad_();
    torch::optim::SGD optimizer({param}, torch::optim::SGDOptions(1));
    ShardedGradScaler scaler({.init_scale = 4});
    if (rank == 0) {
      scaler.scale((param * 2).sum()).backward();
    }
    TESSERA_EXPECT(scaler.step(optimizer));
    scaler.update();
    expect_bit_equal(param.detach(), at::zeros({3}) - (rank == 0 ? 2 : 0));
    const auto half = at::zeros({1}, at::kHalf) + 0.5;
    TESSERA_EXPECT(scaler.scale(half).scalar_type() == at::kHalf);
    ShardedGradScaler off({.enabled = false});
    TESSERA_EXPECT(off.scale(half).is_same(half) && off.get_scale() == 1);
    TESSERA_EXPECT(off.step(optimizer));
    off.update();
  });
}

TEST_CASE("the gradient of a parameter that is listed twice is unscaled once", "[grad_scaler]") {
  run_ranks(2, [](int) {
    auto param = at::zeros({3}).requires_grad_();
    auto tower = Tower();
    tower->register_module("again", tower->out);
    fill_parameters(*tower, 1);
    shard_tower(tower);
    auto params = tower->parameters();  // out's twice, as a tied module's are
    params.insert(params.end(), {param, param});
    torch::optim::SGD optimizer(params, torch::optim::SGDOptions(1));
    ShardedGradScaler scaler({.init_scale = 4});
    scaler.scale((param * 2).sum() + loss_of(tower, 0)).backward();
    const auto scaled = to_local(tower->out->weight.grad()).clone();
    scaler.unscale_(optimizer);
    expect_bit_equal(param.grad(), at::zeros({3}) + 2);
    expect_bit_equal(to_local(tower->out->weight.grad()), scaled / 4);
  });
}

TEST_CASE("the scaler refuses calls in the wrong order and factors that do not scale", "[grad_scaler]") {
  run_ranks(1, [](int) {
    auto param = at::zeros({3}).requires_grad_();
    torch::optim::SGD optimizer({param}, torch::optim::SGDOptions(1));
    ShardedGradScaler scaler;
    expect_throws<StateError>([&] { scaler.update(); }, "no optimizer stepped");
    scaler.unscale_(optimizer);
    expect_throws<StateError>([&] { scaler.unscale_(optimizer); }, "unscaled since the last update()");
    scaler.step(optimizer);
    expect_throws<StateError>([&] { scaler.step(optimizer); }, "stepped since the last update()");
    scaler.update(32);
    expect_equal(scaler.get_scale(), 32.0);
    expect_throws<ValueError>([&] { scaler.update(-1); }, "the scale is -1");
    expect_throws<ValueError>([] { ShardedGradScaler({.growth_factor = 1}); }, "growth_factor is 1");
    expect_throws<ValueError>([] { ShardedGradScaler({.backoff_factor = 2}); }, "backoff_factor is 2");
    expect_throws<ValueError>([] { ShardedGradScaler({.growth_interval = 0}); }, "growth_interval is 0");
    expect_throws<ValueError>([] { ShardedGradScaler({.init_scale = 0}); }, "init_scale is 0");
  });
}

}  // namespace tessera::testing
