// FullyShardedDataParallel on every device that there is: where modules, inputs and state dicts are.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "nn/hooks/hook_point.h"
#include "testing/expect.h"
#include "testing/fsdp_models/nested_wrapped_models.h"
#include "testing/fsdp_models/parity_driver.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "testing/test_devices.h"
#include "tests/reference/wrapped_tower.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr Tolerance kOtherDevice{.rtol = 1e-4, .atol = 1e-5};

bool has_second_gpu() {
  return test_devices().size() > 1 && c10::impl::getDeviceGuardImpl(at::kCUDA)->deviceCount() > 1;
}

/// Expects that shards are on `device`, that a batch on the CPU is moved there, and the gradients of the plain model.
void expect_trains_on(c10::Device device, const TowerModel& model) {
  for (const auto& parameter : model->parameters()) {
    TESSERA_EXPECT(is_dtensor(parameter) && to_local(parameter.detach()).device() == device);
  }
  std::vector<c10::Device> seen;
  const ScopedHook hook(
      hook_point(*model->blocks[1], "test").register_forward_pre_hook([&](HookPoint&, TensorRefs inputs) {
        seen = {inputs[0]->device(), model->blocks[1]->up->weight.device()};
      }));
  model->zero_grad();
  const auto output = model(batch_of(get_rank()));
  TESSERA_EXPECT(output.device() == device);
  TESSERA_EXPECT((seen == std::vector<c10::Device>{device, device}));
  weighted_loss(output).backward();
  const auto reference = reference_after_backward()->named_parameters();
  for (const auto& item : model->named_parameters()) {
    TESSERA_EXPECT(to_local(item.value().grad()).device() == device);
    expect_close(full_tensor(item.value().grad()).cpu(), reference[item.key()].grad(), kOtherDevice);
  }
}

std::vector<at::Tensor> parameter_values(const TowerModel& model) {
  std::vector<at::Tensor> values;
  for (const auto& parameter : model->parameters()) {
    values.push_back(full_tensor(parameter.detach()).clone());
  }
  return values;
}

}  // namespace

TEST_CASE("rows 54, 55, 66: device_id takes a module from the CPU, also as an index, and the root moves its inputs") {
  run_ranks_on_devices(2, [](int, c10::Device device) {
    std::vector<DeviceId> ids{device, device.type()};
    if (device.is_cuda()) {
      ids.emplace_back(0);
    }
    for (const auto& id : ids) {
      auto tower = make_tower();
      tower->register_buffer("scale", at::ones({3}));
      const TowerModel model(tower, {.auto_wrap_policy = block_policy(), .device_id = id});
      TESSERA_EXPECT(model.options().device_id == device && model.device_mesh().device_type() == device.type());
      TESSERA_EXPECT(model->named_buffers()["scale"].device() == device);
      expect_trains_on(device, model);
    }
  });
}

TEST_CASE("rows 54, 55: a module is sharded where it is, and the root moves inputs there without device_id") {
  run_ranks_on_devices(2, [](int, c10::Device device) {
    for (const bool names_it : {false, true}) {
      auto tower = make_tower();
      tower->to(device);
      FSDPOptions options{.auto_wrap_policy = block_policy()};
      if (names_it) {
        options.device_id = device.type();
      }
      expect_trains_on(device, TowerModel(tower, options));
    }
    expect_trains_on(at::kCPU, make_model());  // though there may be a GPU
  });
}

TEST_CASE(
    "rows 54, 66: the type of a device means the current one, an index any; another than the module's is refused") {
  if (!has_second_gpu()) {
    return;
  }
  run_ranks(2, [](int rank) {
    const c10::Device first(at::kCUDA, 0), second(at::kCUDA, 1);
    {
      const c10::DeviceGuard current(second);
      expect_trains_on(second, make_model({.device_id = at::kCUDA}));
    }
    expect_trains_on(second, make_model({.device_id = 1}));
    auto tower = make_tower();
    tower->to(first);
    expect_throws<ValueError>([&] { wrap_module(*tower, {.device_id = 1}); },
                              "'in.weight' is on cuda:0, but device_id is cuda:1; move the module there");
    expect_throws<ValueError>([] { make_model({.device_id = -1}); }, "device_id: -1 is no index of a GPU");
    expect_throws<ValueError>([] { make_model({.device_id = 1000}); }, "device_id: 1000 is no index of a GPU");
    // One rank's is an error on all.
    const auto wrap = [&] { make_model({.device_id = rank == 1 ? 99 : 0}); };
    expect_throws<ValueError>(
        wrap, rank == 1 ? "device_id is cuda:99, but this process sees" : "rank 1 cannot: device_id is cuda:99");
  });
}

TEST_CASE("row 95: to(), cpu() and cuda() after wrapping: what is as asked for stays, and the rest follows") {
  const int ranks = GENERATE(1, 2, 3);
  run_ranks_on_devices(ranks, [](int, c10::Device device) {
    auto tower = make_tower();
    tower->register_buffer("scale", at::ones({3}, at::kHalf));
    tower->register_buffer("count", at::arange(3));
    const TowerModel model(tower, {.auto_wrap_policy = block_policy(), .device_id = device});
    const auto before = parameter_values(model);
    const auto buffer_dtypes = [&] {
      const auto buffers = model->named_buffers();
      return std::pair(buffers["scale"].scalar_type(), buffers["count"].scalar_type());
    };
    expect_throws<ValueError>([&] { model.to(at::kLong); }, "Long is no floating dtype");
    FSDP::summon_full_params(*model, {}, [&] {
      expect_throws<ValueError>([&] { model.to(at::kFloat); }, "SUMMON_FULL_PARAMS, allowed: IDLE");
      expect_throws<ValueError>([&] { model.to(device); }, "SUMMON_FULL_PARAMS, allowed: IDLE");
    });
    TESSERA_EXPECT(buffer_dtypes() == std::pair(at::kHalf, at::kLong));
    TESSERA_EXPECT(model->named_buffers()["scale"].device() == device);
    // In the middle of training.
    expect_trains_on(device, model);
    model->register_buffer("late", at::ones({2}, at::kDouble));
    model.to(at::kFloat);
    TESSERA_EXPECT(buffer_dtypes() == std::pair(at::kFloat, at::kLong));
    device.is_cpu() ? model.cpu() : model.cuda();
    TESSERA_EXPECT(model->named_buffers()["late"].device() == device);
    TESSERA_EXPECT(model->named_buffers()["late"].scalar_type() == at::kFloat);
    model.to(device);
    model->to(at::kFloat);  // libtorch's own
    const auto after = parameter_values(model);
    for (size_t i = 0; i < before.size(); ++i) {
      expect_bit_equal(after[i], before[i]);
    }
    for (const auto& parameter : model->parameters()) {
      TESSERA_EXPECT(is_dtensor(parameter) && is_dtensor(parameter.grad()));
    }
    expect_trains_on(device, model);
  });
}

TEST_CASE("row 84: entries of state dicts are on the CPU with offload_to_cpu, and else where the model is") {
  run_ranks_on_devices(2, [](int, c10::Device device) {
    auto tower = make_tower();
    tower->register_buffer("scale", at::ones({3}));
    const TowerModel model(tower, {.auto_wrap_policy = block_policy(), .device_id = device});
    const auto plain = make_tower()->named_parameters();
    for (const bool offloads : {false, true}) {
      const auto where = offloads ? c10::Device(at::kCPU) : device;
      FSDP::set_state_dict_type(*model, StateDictSettings::make(StateDictType::FULL_STATE_DICT,
                                                                FullStateDictConfig{.offload_to_cpu = offloads}));
      const auto full = FSDP::state_dict(*model);
      expect_equal(full.size(), plain.size() + 1);
      for (const auto& item : full) {
        TESSERA_EXPECT(!is_dtensor(item.value()) && item.value().device() == where);
      }
      for (const auto& item : plain) {
        expect_bit_equal(full[item.key()].cpu(), item.value().detach());
      }
      {
        const at::NoGradGuard no_grad;
        for (auto& parameter : model->parameters()) {
          parameter.zero_();
        }
      }
      FSDP::load_state_dict(*model, full);
      FSDP::set_state_dict_type(*model, StateDictSettings::make(StateDictType::SHARDED_STATE_DICT,
                                                                ShardedStateDictConfig{.offload_to_cpu = offloads}));
      for (const auto& item : FSDP::state_dict(*model)) {
        const auto own = is_dtensor(item.value()) ? to_local(item.value()) : item.value();
        TESSERA_EXPECT(own.device() == where);
      }
      expect_trains_on(device, model);
    }
  });
}

TEST_CASE("rows 49, 51: the parity driver under FullyShardedDataParallel: moved before wrapping, or by device_id") {
  run_ranks_on_devices(2, [](int, c10::Device device) {
    for (const auto strategy : kAllStrategies) {
      for (const auto mode : {DEVICEInitMode::DEVICE_BEFORE, DEVICEInitMode::DEVICE_NEVER}) {
        FSDPParityOptions options{.mesh = mesh_for(strategy, device.type()), .device_init_mode = mode};
        options.init_options.device = device;
        options.wrapper_options = FSDPOptions{.sharding_strategy = strategy};
        if (mode == DEVICEInitMode::DEVICE_NEVER) {
          options.wrapper_options->device_id = device;
        }
        test_fsdp_parity(nested_wrapped_model(), options);
      }
    }
  });
}

}  // namespace tessera::testing
