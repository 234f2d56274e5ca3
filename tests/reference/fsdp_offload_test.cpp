// What is offloaded to the CPU: the train loop, FullyShardedDataParallel and summon_full_params, on every device that
// there is.

#include <ATen/core/grad_mode.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>

#include "base/error.h"
#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "nn/hooks/hook_point.h"
#include "testing/expect.h"
#include "testing/fsdp_models/nested_wrapped_models.h"
#include "testing/fsdp_models/parity_driver.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "testing/test_devices.h"
#include "tests/reference/captured_warnings.h"
#include "tests/reference/wrapped_tower.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr const char* kCopyOnEveryRank =
    "summon_full_params: offload_to_cpu on every rank holds a full copy of the model a rank of this host; pass "
    "rank0_only = true for one";

FullyShardOptions offloading() {
  return {.offload_policy = CPUOffloadPolicy{}};
}

/// Units inside of one that has the rest; parameters that are offloaded are on the CPU from the start.
std::shared_ptr<FSDPTestModel> nested_on(c10::Device device, const FullyShardOptions& options) {
  InitOptions init{.mesh = init_device_mesh(device.type(), {get_world_size()}, {"dp"}),
                   .fsdp_init_mode = FSDPInitMode::RECURSIVE,
                   .fsdp_options = options,
                   .deterministic = true,
                   .device = device};
  if (options.offload_policy) {
    init.device_init_mode = DEVICEInitMode::DEVICE_NEVER;
  }
  auto model = nested_wrapped_model().init(init);
  wrap_unit(*model, init);
  return model;
}

/// After backward the outermost unit's parameters are gathered again.
class UnshardedAfterBackward : public DummyDDP {
 public:
  using DummyDDP::DummyDDP;
  void run_backward(const at::Tensor& loss) override {
    DummyDDP::run_backward(loss);
    fsdp(*module).unshard();
  }
};

}  // namespace

TEST_CASE("row 44: the train loop finds offloaded parameters on the CPU, and losses are where they are") {
  run_ranks_on_devices(2, [](int, c10::Device device) {
    const auto plain = train_for_several_steps(*nested_on(device, {}));
    TESSERA_EXPECT(plain.device() == device);
    for (const bool reshards : {true, false}) {
      auto options = offloading();
      options.reshard_after_forward = reshards;
      const auto model = nested_on(device, options);
      const auto loss =
          train_for_several_steps(*model, {.cpu_offload = true, .reshard_after_forward = reshards, .device = device});
      TESSERA_EXPECT(loss.device().is_cpu());
      expect_close(loss, plain.cpu());
    }
  });
}

TEST_CASE("row 44: the train loop reports parameters that are not on the CPU though they should be offloaded") {
  run_ranks_on_devices(2, [](int, c10::Device device) {
    const TrainOptions options{.cpu_offload = true, .device = device};
    const auto expect_fault = [&](FSDPTestModel& model, const std::string& text) {
      if (device.is_cpu()) {  // where nothing is anywhere else
        train_for_several_steps(model, options);
      } else {
        expect_throws<ExpectationError>([&] { train_for_several_steps(model, options); }, text);
      }
    };
    expect_fault(*nested_on(device, {}), "after forward 'weight' of module.1.0 is on cuda:0, expected cpu");
    auto keeps = offloading();
    keeps.reshard_after_forward = false;
    expect_fault(*nested_on(device, keeps), "after forward 'weight' of module.1.0 is on cuda:0, expected cpu");
    if (!device.is_cpu()) {
      const auto unsharded = std::make_shared<UnshardedAfterBackward>(nested_on(device, offloading()));
      expect_fault(*unsharded, "after backward 'weight' of module.module.0 is on cuda:0, expected cpu");
    }
  });
}

namespace {

constexpr double kMaxNorm = 0.5;

at::Tensor batch_on(c10::Device device, int rank) {
  return batch_of(rank).to(device);
}

/// What three steps leave, and what they sent.
struct Trained {
  TowerModel model;
  torch::optim::Adam optimizer;
  CommStats sent;
};

/// Expects that a block computes on `device`, and has its parameters there.
void expect_computes_on(torch::nn::Module& module, c10::Device device) {
  auto& block = dynamic_cast<BlockImpl&>(module);
  find_hook_point(module)->register_forward_pre_hook([&block, device](HookPoint&, TensorRefs inputs) {
    TESSERA_EXPECT(inputs[0]->device() == device);
    TESSERA_EXPECT(!is_dtensor(block.up->weight) && block.up->weight.device() == device);
  });
}

/// This rank's parts of parameters, and of their gradients where there are some.
void expect_shards_on(c10::Device device, torch::nn::Module& module) {
  for (const auto& parameter : module.parameters()) {
    TESSERA_EXPECT(is_dtensor(parameter) && to_local(parameter.detach()).device() == device);
    TESSERA_EXPECT(!parameter.grad().defined() || to_local(parameter.grad()).device() == device);
  }
}

Trained train_tower(c10::Device device, FSDPOptions options) {
  options.device_id = device;
  const auto model = make_model(options);
  const auto between_uses = options.cpu_offload.offload_params ? c10::Device(c10::kCPU) : device;
  expect_shards_on(between_uses, *model);
  for (auto& block : model->blocks) {
    expect_computes_on(*block, device);
  }
  torch::optim::Adam optimizer(model->parameters(), 1e-2);
  reset_comm_stats();
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const auto output = model(batch_on(device, get_rank()));
    TESSERA_EXPECT(output.device() == device);
    weighted_loss(output).backward();
    expect_shards_on(between_uses, *model);
    model.clip_grad_norm_(kMaxNorm);
    optimizer.step();
  }
  return {model, std::move(optimizer), comm_stats()};
}

/// The same steps of one process with all ranks' batches.
Tower train_reference(c10::Device device) {
  auto reference = make_tower();
  reference->to(device);
  torch::optim::Adam optimizer(reference->parameters(), 1e-2);
  for (int step = 0; step < 3; ++step) {
    average_reference(*reference, get_world_size(),
                      [&](int rank) { weighted_loss(reference(batch_on(device, rank))).backward(); });
    torch::nn::utils::clip_grad_norm_(reference->parameters(), kMaxNorm);
    optimizer.step();
  }
  return reference;
}

void expect_moments_on(c10::Device device, Trained& trained) {
  for (const auto& parameter : trained.model->parameters()) {
    const auto& state = trained.optimizer.state().at(parameter.unsafeGetTensorImpl());
    const auto& moments = static_cast<const torch::optim::AdamParamState&>(*state);
    TESSERA_EXPECT(to_local(moments.exp_avg()).device() == device && to_local(moments.exp_avg_sq()).device() == device);
  }
}

void expect_same_traffic(const CommStats& actual, const CommStats& expected) {
  TESSERA_EXPECT(expected.bytes_sent() > 0);
  for (size_t kind = 0; kind < kCollectiveCount; ++kind) {
    expect_equal(actual.entries[kind].calls, expected.entries[kind].calls);
    expect_equal(actual.entries[kind].bytes_sent, expected.entries[kind].bytes_sent);
  }
}

}  // namespace

TEST_CASE("rows 40, 60: cpu_offload: shards, gradients and optimizer states on the CPU, and training as without") {
  const int world_size = GENERATE(2, 4);
  const auto strategy =
      GENERATE(Strategy::FULL_SHARD, Strategy::SHARD_GRAD_OP, Strategy::NO_SHARD, Strategy::HYBRID_SHARD);
  CAPTURE(to_string(strategy));
  run_ranks_on_devices(world_size, [&](int, c10::Device device) {
    auto plain = train_tower(device, {.sharding_strategy = strategy});
    auto offloaded = train_tower(device, {.sharding_strategy = strategy, .cpu_offload = {.offload_params = true}});
    TESSERA_EXPECT(!plain.model.options().cpu_offload.offload_params);
    TESSERA_EXPECT(offloaded.model.options().cpu_offload.offload_params);
    expect_moments_on(device, plain);
    expect_moments_on(at::kCPU, offloaded);
    expect_same_traffic(offloaded.sent, plain.sent);
    const auto expected = plain.model->named_parameters();
    const auto reference = train_reference(device)->named_parameters();
    for (const auto& item : offloaded.model->named_parameters()) {
      const auto full = full_tensor(item.value().detach());
      const auto without = full_tensor(expected[item.key()].detach()).cpu();
      // Adam of another device rounds otherwise.
      device.is_cpu() ? expect_bit_equal(full, without) : expect_close(full, without, {.rtol = 1e-4, .atol = 1e-5});
      expect_close(full, reference[item.key()].detach().cpu(), {.rtol = 1e-4, .atol = 1e-5});
    }
  });
}

TEST_CASE("row 60: what cpu_offload keeps on the CPU computes on the GPU, where there is one, without being told") {
  const auto accelerator = test_devices().back();
  run_ranks(2, [&](int) {
    expect_equal(make_model({.cpu_offload = {.offload_params = true}}).device_mesh().device_type(), accelerator.type());
    expect_equal(make_model().device_mesh().device_type(), at::kCPU);
  });
}

TEST_CASE("row 60: ranks have to agree on cpu_offload") {
  run_ranks_on_devices(2, [](int rank, c10::Device device) {
    for (const auto strategy : {Strategy::FULL_SHARD, Strategy::NO_SHARD}) {
      FSDPOptions options{.sharding_strategy = strategy, .device_id = device};
      options.cpu_offload.offload_params = rank == 0;
      expect_throws<ValueError>([&] { make_model(options); }, "offloaded to the CPU");
    }
  });
}

TEST_CASE("row 60: the parity driver with shards offloaded to the CPU") {
  run_ranks_on_devices(2, [](int, c10::Device device) {
    FSDPParityOptions options{.mesh = init_device_mesh(device.type(), {2}, {"dp"}),
                              .device_init_mode = DEVICEInitMode::DEVICE_NEVER,
                              .num_iters = 3};
    options.init_options.device = device;
    options.fsdp_options.offload_policy = CPUOffloadPolicy{};
    test_fsdp_parity(nested_wrapped_model(), options);
  });
}

TEST_CASE("rows 92, 116: summon_full_params on the CPU: full values, edits come to the shards, and a warning") {
  run_ranks_on_devices(2, [](int, c10::Device device) {
    const auto model = make_model({.device_id = device});
    const auto plain = make_tower()->named_parameters();
    const auto expect_full_on = [&](c10::Device where) {
      for (const auto& item : model->named_parameters()) {
        TESSERA_EXPECT(!is_dtensor(item.value()) && item.value().device() == where);
        expect_bit_equal(item.value().detach().cpu(), plain[item.key()].detach());
      }
    };
    const CapturedWarnings warnings;
    FSDP::summon_full_params(*model, {}, [&] { expect_full_on(device); });
    expect_equal(warnings.texts().size(), 0u);
    FSDP::summon_full_params(*model, {.offload_to_cpu = true}, [&] {
      expect_full_on(at::kCPU);
      const at::NoGradGuard no_grad;
      model->in->weight.fill_(2);
    });
    expect_equal(warnings.texts(), std::vector<std::string>{kCopyOnEveryRank});
    TESSERA_EXPECT(to_local(model->in->weight.detach()).device() == device);
    expect_equal(full_tensor(model->in->weight.detach()).sum().item<float>(), 80.f);
    FSDP::summon_full_params(*model, {.writeback = false, .offload_to_cpu = true}, [&] {
      const at::NoGradGuard no_grad;
      model->in->weight.fill_(3);
    });
    expect_equal(full_tensor(model->in->weight.detach()).sum().item<float>(), 80.f);
  });
}

TEST_CASE("rows 91, 92: summon_full_params on the CPU of rank 0 alone: the others keep shards, without a warning") {
  run_ranks_on_devices(2, [](int rank, c10::Device device) {
    const auto model = make_model({.device_id = device});
    const CapturedWarnings warnings;
    FSDP::summon_full_params(*model, {.writeback = false, .rank0_only = true, .offload_to_cpu = true}, [&] {
      for (const auto& parameter : model->parameters()) {
        expect_equal(is_dtensor(parameter), rank != 0);
        TESSERA_EXPECT((rank == 0 ? parameter : to_local(parameter)).device() == (rank == 0 ? at::kCPU : device));
      }
    });
    expect_equal(warnings.texts().size(), 0u);
  });
}

TEST_CASE("rows 92, 116: summon_full_params on the CPU is refused where nothing is sharded, and nothing has changed") {
  for (const int world_size : {1, 2}) {  // among one rank every strategy is NO_SHARD
    run_ranks_on_devices(world_size, [&](int, c10::Device device) {
      const auto model = make_model(
          {.sharding_strategy = world_size == 1 ? Strategy::FULL_SHARD : Strategy::NO_SHARD, .device_id = device});
      const CapturedWarnings warnings;
      expect_throws<NotImplementedError>(
          [&] { FSDP::summon_full_params(*model, {.offload_to_cpu = true}, [] { throw Error("the body ran"); }); },
          "is not sharded (NO_SHARD)");
      expect_equal(warnings.texts().size(), 0u);
      TESSERA_EXPECT(model.training_state() == TrainingState::IDLE);
      TESSERA_EXPECT(to_local(model->in->weight.detach()).device() == device);
      weighted_loss(model(batch_on(device, get_rank()))).backward();
    });
  }
}

}  // namespace tessera::testing
