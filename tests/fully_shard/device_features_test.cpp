// Everything beside the plain way: a model trains to the same on every device that there is, each rank on a stream of
// its own. On the CPU each of these has tests of its own against one process.

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <torch/optim/sgd.h>

#include "dtensor/dtensor.h"
#include "dtensor/random/random.h"
#include "fsdp1/fsdp.h"
#include "fully_shard/replicate.h"
#include "fully_shard/to_empty.h"
#include "nn/meta_device.h"
#include "nn/reset_parameters.h"
#include "optim/fused_optimizers.h"
#include "optim/sharded_grad_scaler.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "testing/test_devices.h"
#include "tests/fully_shard/models/lora_models.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr Tolerance kTolerance{.rtol = 1e-5, .atol = 1e-6};
// For numbers of 16 bits: kernels of a real GPU add up in another order, and what is near the middle of two is rounded
// apart.
constexpr Tolerance kLowPrecision{.rtol = 2e-2, .atol = 5e-3};

struct Rank {
  int rank;
  c10::Device device;
};

/// What the ranks' `body` returns, one after the other, is the same on each device; `on_real_gpu`, where there is one.
/// The simulated GPU computes by the CPU's kernels.
void expect_same_on_devices(int world_size, const std::function<std::vector<at::Tensor>(const Rank&)>& body,
                            Tolerance on_real_gpu = kTolerance) {
  using OfRanks = std::vector<std::vector<at::Tensor>>;
  OfRanks on_cpu(static_cast<size_t>(world_size)), on_gpu = on_cpu;
  run_ranks_on_devices(world_size, [&](int rank, c10::Device device) {
    for (const auto& tensor : body({.rank = rank, .device = device})) {
      (device.is_cpu() ? on_cpu : on_gpu)[static_cast<size_t>(rank)].push_back(tensor.cpu());
    }
  });
  CAPTURE(world_size);
  REQUIRE_FALSE(on_cpu[0].empty());
  if (test_devices().size() == 1) {
    return;
  }
  const Tolerance tolerance = at::hasCUDA() ? on_real_gpu : kTolerance;
  for (size_t rank = 0; rank < on_cpu.size(); ++rank) {
    REQUIRE(on_gpu[rank].size() == on_cpu[rank].size());
    for (size_t i = 0; i < on_cpu[rank].size(); ++i) {
      CHECK_NOTHROW(expect_close(on_gpu[rank][i], on_cpu[rank][i], tolerance));
    }
  }
}

Tower tower_on(c10::Device device) {
  Tower tower;
  fill_parameters(*tower, 1);
  tower->to(device);
  return tower;
}

at::Tensor batch_of(const Rank& rank, int step) {
  return make_batch(static_cast<uint64_t>(10 * step + rank.rank), 3, 5).to(rank.device);
}

at::Tensor loss_of(const at::Tensor& output) {
  return weighted_loss(output.to(at::kFloat));
}

std::vector<at::Tensor> full_parameters(torch::nn::Module& module) {
  std::vector<at::Tensor> full;
  for (const auto& param : module.parameters()) {
    full.push_back(is_dtensor(param) ? full_tensor(param.detach()) : param.detach().clone());
  }
  return full;
}

/// Devices draw numbers of their own, of which nothing is known here but that they are numbers. From here on all have
/// those of the CPU.
void fill_with_equal_values(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  auto generator = make_generator(7);
  for (auto& param : module.parameters()) {
    TESSERA_EXPECT(full_tensor(param.detach()).isfinite().all().item<bool>());
    const auto values = at::randn(param.sizes(), generator).mul_(0.3).to(to_local(param).device());
    param.copy_(distribute_tensor(values, device_mesh(param), placements(param)));
  }
}

/// Some steps of SGD, two backwards each; `before_backward` gets the number of the backward.
std::vector<at::Tensor> train(Tower& tower, const Rank& rank, const std::function<void(int)>& before_backward = {}) {
  torch::optim::SGD optimizer(tower->parameters(), 0.1);
  for (int step = 0; step < 4; ++step) {
    if (before_backward) {
      before_backward(step);
    }
    loss_of(tower(batch_of(rank, step))).backward();
    if (step % 2 == 1) {
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  return full_parameters(*tower);
}

/// Sends bfloat16.
struct HalfOfBytes : AllGatherExtension {
  int64_t encoded_bytes(int64_t numel) const override { return 2 * numel; }
  void pre_all_gather(const at::Tensor& shard, const at::Tensor& encoded) const override {
    encoded.view(at::kBFloat16).copy_(shard);
  }
  void post_all_gather(const at::Tensor& encoded, const at::Tensor& decoded) const override {
    decoded.copy_(encoded.view(at::kBFloat16));
  }
};

}  // namespace

TEST_CASE("devices: a model that is built on the meta device starts and trains alike") {
  expect_same_on_devices(3, [](const Rank& rank) {
    Tower tower = [] {
      const MetaDeviceGuard on_meta;
      return Tower();
    }();
    shard_tower(tower, {.mesh = init_device_mesh(rank.device.type(), {3})});
    to_empty(tower, rank.device);
    tessera::manual_seed(7);
    reset_parameters(*tower);
    fill_with_equal_values(*tower);
    return train(tower, rank);
  });
}

TEST_CASE("devices: dtypes by parameter, and an extension of the all-gather, train alike") {
  const auto reshard = GENERATE(ReshardAfterForward(true), ReshardAfterForward(2));
  const auto dtype = GENERATE(at::kBFloat16, at::kHalf, at::kFloat);
  expect_same_on_devices(
      4,
      [&](const Rank& rank) {
        auto tower = tower_on(rank.device);
        shard_tower(tower, {.mesh = init_device_mesh(rank.device.type(), {4}),
                            .reshard_after_forward = reshard,
                            .mp_policy = {.param_dtype = dtype, .reduce_dtype = at::kFloat},
                            .all_gather_extension_fn = [](const at::Tensor& param, const std::string&) {
                              return param.dim() == 2 ? std::make_shared<HalfOfBytes>() : nullptr;
                            }});
        return train(tower, rank);
      },
      kLowPrecision);
}

TEST_CASE("devices: frozen parameters of another dtype train alike") {
  const bool offloads = GENERATE(false, true);
  const bool casts = GENERATE(false, true);
  expect_same_on_devices(
      3,
      [&](const Rank& rank) {
        auto lora = make_lora();
        FullyShardOptions options{.mesh = init_device_mesh(rank.device.type(), {3})};
        if (casts) {
          options.mp_policy.param_dtype = at::kFloat;
        }
        if (offloads) {
          options.offload_policy = CPUOffloadPolicy{};
        } else {
          lora->to(rank.device);
        }
        for (auto& block : lora->blocks) {
          fully_shard(block, options);
        }
        fully_shard(lora, options);
        torch::optim::SGD optimizer(lora->parameters(), 0.1);
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          loss_of(lora(batch_of(rank, step))).backward();
          optimizer.step();
        }
        auto results = full_parameters(*lora);
        for (auto& result : results) {
          result = result.to(at::kFloat);
        }
        return results;
      },
      kLowPrecision);
}

TEST_CASE("devices: ranks that freeze different parameters are refused by the first iteration, with the names") {
  const int world_size = GENERATE(1, 2, 3, 4);
  const bool replicates = GENERATE(false, true);
  run_ranks_on_devices(world_size, [&](int rank, c10::Device device) {
    auto tower = tower_on(device);
    const auto mesh = init_device_mesh(device.type(), {world_size});
    if (replicates) {
      replicate(tower, {.mesh = mesh});
    } else {
      shard_tower(tower, {.mesh = mesh});
    }
    const auto iterate = [&] { loss_of(tower(batch_of({.rank = rank, .device = device}, 0))).backward(); };
    auto& param = rank == 0 ? tower->norm->weight : tower->norm->bias;  // of equal size
    param.set_requires_grad(false);
    if (world_size > 1 && !device.is_cpu()) {  // on the CPU: frozen_params_test
      expect_throws<ValueError>(iterate,
                                "the same parameters of tessera::testing::TowerImpl: the ranks differ: rank 0 has "
                                "'norm.weight' of unit 'root' frozen, rank 1 has 'norm.bias' of unit 'root' frozen");
      param.set_requires_grad(rank == 0);
      expect_throws<ValueError>(iterate,
                                "rank 0 has no frozen parameter, rank 1 has 'norm.bias' of unit 'root' frozen");
      TESSERA_EXPECT(!tower->out->weight.grad().defined());
    }
    param.set_requires_grad(true);
    tower->norm->weight.set_requires_grad(false);
    iterate();
    TESSERA_EXPECT(!tower->norm->weight.grad().defined());
    TESSERA_EXPECT(tower->norm->bias.grad().defined() && tower->out->weight.grad().defined());
  });
}

TEST_CASE("devices: gradients that are kept, scattered only, or divided otherwise train alike") {
  expect_same_on_devices(4, [](const Rank& rank) {
    auto tower = tower_on(rank.device);
    shard_tower(tower, {.mesh = init_device_mesh(rank.device.type(), {2, 2}, {"replicate", "shard"})});
    fsdp(tower).set_gradient_divide_factor(3);
    auto results = train(tower, rank, [&](int step) { fsdp(tower).set_requires_gradient_sync(step % 2 == 1); });
    fsdp(tower).set_requires_gradient_sync(true);
    const auto more = train(tower, rank, [&](int step) { fsdp(tower).set_requires_all_reduce(step % 2 == 1); });
    results.insert(results.end(), more.begin(), more.end());
    return results;
  });
}

TEST_CASE("devices: replicas whose gradients share all-reduces, or are offloaded, train alike") {
  const bool offloads = GENERATE(false, true);
  expect_same_on_devices(3, [&](const Rank& rank) {
    Tower tower;
    fill_parameters(*tower, 1);
    ReplicateOptions options{.mesh = init_device_mesh(rank.device.type(), {3}), .bucket_cap_mb = 0.001};
    if (offloads) {
      options.offload_policy = CPUOffloadPolicy{};
    } else {
      tower->to(rank.device);
    }
    for (auto& block : tower->blocks) {
      replicate(block, options);
    }
    replicate(tower, options);
    return train(tower, rank);
  });
}

TEST_CASE("devices: the first interface: clipping, full parameters and state dicts") {
  expect_same_on_devices(
      2,
      [](const Rank& rank) {
        auto tower = tower_on(rank.device);
        const FullyShardedDataParallel wrapped(
            tower, {.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat},
                    .device_mesh = init_device_mesh(rank.device.type(), {2})});
        torch::optim::SGD optimizer(tower->parameters(), 0.1);
        std::vector<at::Tensor> results;
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          loss_of(wrapped(batch_of(rank, step))).backward();
          results.push_back(wrapped.clip_grad_norm_(0.1).to(at::kFloat));
          optimizer.step();
        }
        FSDP::summon_full_params(*tower, {.writeback = false, .offload_to_cpu = true}, [&] {
          for (const auto& param : tower->parameters()) {
            TESSERA_EXPECT(param.is_cpu());
            results.push_back(param.detach().clone());
          }
        });
        const auto state = FSDP::state_dict(*tower);
        FSDP::load_state_dict(*tower, state);
        const auto full = full_parameters(*tower);
        results.insert(results.end(), full.begin(), full.end());
        return results;
      },
      kLowPrecision);
}

TEST_CASE("devices: fused optimizers step alike, with a rate that changes and a parameter that joins later") {
  const int kind = GENERATE(0, 1, 2);
  constexpr double kEps = 1e-3;  // gradients of nearly 0, which devices round apart, are not to count as others do
  const auto train = [&](const Rank& rank) {
    auto tower = tower_on(rank.device);
    shard_tower(tower, {.mesh = init_device_mesh(rank.device.type(), {3})});
    const auto params = tower->parameters();
    const auto optimizer = [&]() -> std::unique_ptr<torch::optim::Optimizer> {
      switch (kind) {
        case 0:
          return std::make_unique<optim::FusedAdam>(params, torch::optim::AdamOptions(0.05).eps(kEps).amsgrad(true));
        case 1:
          return std::make_unique<optim::FusedAdamW>(params, torch::optim::AdamWOptions(0.05).eps(kEps));
        default:
          return std::make_unique<optim::FusedSGD>(params, torch::optim::SGDOptions(0.05).momentum(0.9));
      }
    }();
    for (int step = 0; step < 4; ++step) {
      optimizer->zero_grad();
      loss_of(tower(batch_of(rank, step))).backward();
      if (step == 0) {
        params.back().mutable_grad() = at::Tensor();
      }
      optimizer->param_groups()[0].options().set_lr(0.05 / (step + 1));
      optimizer->step();
    }
    return full_parameters(*tower);
  };
  expect_same_on_devices(3, train, {.rtol = 1e-4, .atol = 1e-5});  // rounding moves Adam's steps by about kTolerance
}

TEST_CASE("devices: a scaled loss, of which one overflows on one rank") {
  expect_same_on_devices(2, [](const Rank& rank) {
    auto tower = tower_on(rank.device);
    shard_tower(tower, {.mesh = init_device_mesh(rank.device.type(), {2})});
    torch::optim::SGD optimizer(tower->parameters(), 0.1);
    ShardedGradScaler scaler({.init_scale = 1024, .growth_interval = 1});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      auto loss = loss_of(tower(batch_of(rank, step)));
      if (step == 1 && rank.rank == 1) {
        loss = loss * INFINITY;
      }
      scaler.scale(loss).backward();
      expect_equal(scaler.step(optimizer), step != 1);
      scaler.update();
    }
    expect_equal(scaler.get_scale(), 2048.0);
    return full_parameters(*tower);
  });
}

}  // namespace tessera::testing
