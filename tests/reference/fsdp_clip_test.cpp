// FullyShardedDataParallel: clipping by the norm of all gradients.

#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>

#include <cmath>
#include <limits>

#include "comm/context/comm_stats.h"
#include "dtensor/clip_grad_norm.h"
#include "dtensor/dtensor.h"
#include "nn/linear.h"
#include "nn/sequential.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/reference/wrapped_tower.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

TEST_CASE("row 100: clip_grad_norm_ clips as on the plain model, with an ignored parameter and replicas") {
  for (const int world_size : {1, 2, 4}) {
    run_ranks(world_size, [](int) {
      for (const double p : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
        for (const auto strategy : {Strategy::FULL_SHARD, Strategy::HYBRID_SHARD}) {
          const auto reference = reference_after_backward();
          const auto model = make_model({.sharding_strategy = strategy});
          run_backward(model);
          const auto expected = clip_grad_norm_(reference->parameters(), 0.01, {.norm_type = p});
          expect_close(model.clip_grad_norm_(0.01, p), expected);
          check_sharded_parity(*reference, *model);
        }
      }
      auto tower = make_tower();
      TowerModel model(tower, {.ignored_states = {tower->out->bias}});
      weighted_loss(model(batch_of(0))).backward();
      auto plain = make_tower();
      weighted_loss(plain(batch_of(0))).backward();
      expect_close(model.clip_grad_norm_(0.01), clip_grad_norm_(plain->parameters(), 0.01));
      expect_close(tower->out->bias.grad(), plain->out->bias.grad());
    });
  }
}

TEST_CASE("rows 101, 103, 116: clip_grad_norm_: factor 1 below the limit; no gradients are a norm of 0; root only") {
  run_ranks(4, [](int) {
    const auto model = make_model();
    TESSERA_EXPECT(model.clip_grad_norm_(1.0).scalar_type() == at::kFloat);
    expect_equal(model.clip_grad_norm_(1.0).item<float>(), 0.f);
    run_backward(model);
    const auto before = to_local(model->in->weight.grad()).clone();
    const auto norm = model.clip_grad_norm_(1e6);
    expect_bit_equal(to_local(model->in->weight.grad()), before);
    // A second call finds the same: nothing was cached that the first one changed.
    expect_bit_equal(model.clip_grad_norm_(1e6), norm);
    const auto infinity = std::numeric_limits<double>::infinity();
    const auto largest = model.clip_grad_norm_(1e6, infinity);
    expect_bit_equal(model.clip_grad_norm_(1e6, infinity), largest);
    expect_throws<StateError>([&] { FSDP::fsdp_modules(*model)[1].clip_grad_norm_(1.0); }, "is a unit of a larger");
    expect_throws<ValueError>([&] { model.clip_grad_norm_(1.0, 0.0); }, "norm_type");
  });
}

TEST_CASE("rows 102, 104: clip_grad_norm_: no traffic where nothing is sharded; gradients of several dtypes") {
  run_ranks(2, [](int) {
    const auto model = make_model({.sharding_strategy = Strategy::NO_SHARD});
    run_backward(model);
    reset_comm_stats();
    const auto norm = model.clip_grad_norm_(0.01);
    expect_equal(comm_stats().calls(), 0);
    expect_close(norm, clip_grad_norm_(reference_after_backward()->parameters(), 0.01));

    tessera::nn::Sequential chain;
    chain->push_back(tessera::nn::Linear(5, 4));
    chain->push_back(tessera::nn::Linear(4, 3));
    fill_parameters(*chain, 3);
    chain->ptr(1)->to(at::kBFloat16);
    wrap_module(*chain->ptr(0));
    wrap_module(*chain->ptr(1));
    const FullyShardedDataParallel mixed(chain);
    auto& second = chain->at<torch::nn::LinearImpl>(1);
    chain->at<torch::nn::LinearImpl>(0).weight.mutable_grad() =
        at::ones_like(chain->at<torch::nn::LinearImpl>(0).weight.detach());
    second.weight.mutable_grad() = at::ones_like(second.weight.detach());
    const auto total = mixed.clip_grad_norm_(100.0);
    TESSERA_EXPECT(total.scalar_type() == at::kFloat);
    expect_close(total, at::full({}, std::sqrt(32.0), at::kFloat));
  });
}

}  // namespace tessera::testing
