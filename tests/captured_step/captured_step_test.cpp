// Captured steps beside the same steps that are not captured: the same bits. On a GPU, or a simulated one.

#include "captured_step/captured_step.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "activation_checkpoint/checkpoint.h"
#include "device_mesh/device_mesh.h"
#include "dtensor/clip_grad_norm.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fsdp_module.h"
#include "optim/fused_optimizers.h"
#include "optim/lr_schedule.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "testing/test_devices.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr int64_t kRows = 3, kDim = 5;

struct StepCase {
  std::string name;
  std::function<void(Tower&)> prepare;
  int passes = 1;
  double dropout = 0;
};

void shard(Tower& tower, FullyShardOptions options = {}) {
  options.mesh = init_device_mesh(at::kCUDA, {1});
  shard_tower(tower, options);
}

std::vector<StepCase> step_cases() {
  return {
      {.name = "no units", .prepare = [](Tower&) {}},
      {.name = "fully_shard", .prepare = [](Tower& tower) { shard(tower); }},
      {.name = "without resharding", .prepare = [](Tower& tower) { shard(tower, {.reshard_after_forward = false}); }},
      {.name = "bfloat16, reduced in float32",
       .prepare =
           [](Tower& tower) {
             shard(tower, {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
           }},
      {.name = "bfloat16, two passes, dropout",
       .prepare = [](Tower& tower) { shard(tower, {.mp_policy = {.param_dtype = at::kBFloat16}}); },
       .passes = 2,
       .dropout = 0.1},
      {.name = "recomputation",
       .prepare =
           [](Tower& tower) {
             for (auto& block : tower->blocks) {
               checkpoint_module(block);
             }
             shard(tower);
           }},
  };
}

/// A model on a GPU, its optimizer, and the tensors that its data enter by.
struct Training {
  Training(StepCase of, c10::Device device) : step_case(std::move(of)) {
    tower->to(device);
    step_case.prepare(tower);
    optimizer =
        std::make_unique<optim::FusedAdamW>(tower->parameters(), torch::optim::AdamWOptions(0.125).weight_decay(0.1));
    batch = at::empty({step_case.passes * kRows, kDim}, device);
  }

  at::Tensor step() {
    optimizer->zero_grad();
    at::Tensor sum;
    for (int64_t pass = 0; pass < step_case.passes; ++pass) {
      const auto input = at::dropout(batch.narrow(0, pass * kRows, kRows), step_case.dropout, /*train=*/true);
      const auto loss = tower(input).square().mean() / step_case.passes;
      loss.backward();
      sum = sum.defined() ? sum + loss.detach() : loss.detach();
    }
    clip_grad_norm_(tower->parameters(), 0.5);
    optimizer->step();
    return sum;
  }

  /// As a float32, so that both optimizers have the same.
  void set_lr(int step) { optim::set_lrs(*optimizer, {1.0 / static_cast<double>(16 << (step % 3))}, 1.0); }

  const StepCase step_case;
  Tower tower = filled_tower();
  std::unique_ptr<optim::FusedAdamW> optimizer;
  at::Tensor batch;
};

/// On one rank with a GPU.
void run_on_gpu(const std::function<void(c10::Device)>& body) {
  for (const c10::Device device : test_devices()) {
    if (!device.is_cpu()) {
      run_ranks(1, [&](int) { body(device); });
    }
  }
}

}  // namespace

TEST_CASE("a captured step has the bits of one that is not, over 100 steps with other data and learning rates") {
  for (const auto& step_case : step_cases()) {
    INFO(step_case.name);
    run_on_gpu([&](c10::Device device) {
      const auto run = [&](bool is_captured) {
        at::manual_seed(1);
        Training training(step_case, device);
        CapturedStep captured(*training.optimizer, [&] { return training.step(); }, {.device = device});
        std::vector<at::Tensor> results;
        for (int step = 0; step < 100; ++step) {
          training.batch.copy_(make_batch(static_cast<uint64_t>(step), step_case.passes * kRows, kDim));
          training.set_lr(step);
          results.push_back((is_captured ? captured() : training.step()).cpu().clone());
        }
        TESSERA_EXPECT(captured.is_captured() == is_captured);
        for (const auto& param : training.tower->parameters()) {
          results.push_back(full_tensor(param.detach()).cpu().clone());
        }
        return results;
      };
      const auto expected = run(false), actual = run(true);
      for (size_t i = 0; i < expected.size(); ++i) {
        expect_bit_equal(actual[i], expected[i]);
      }
    });
  }
}

TEST_CASE("a model goes on without its captured step, from the same step count") {
  run_on_gpu([](c10::Device device) {
    const auto run = [&](bool is_captured) {
      Training training(step_cases()[1], device);
      CapturedStep captured(*training.optimizer, [&] { return training.step(); }, {.device = device});
      for (int step = 0; step < 12; ++step) {
        training.batch.copy_(make_batch(static_cast<uint64_t>(step), kRows, kDim));
        is_captured&& step < 9 ? captured() : training.step();
      }
      const auto& state = training.optimizer->state().begin()->second;
      expect_equal(static_cast<const torch::optim::AdamWParamState&>(*state).step(), int64_t{12});
      std::vector<at::Tensor> params;
      for (const auto& param : training.tower->parameters()) {
        params.push_back(full_tensor(param.detach()).cpu().clone());
      }
      return params;
    };
    const auto expected = run(false), actual = run(true);
    for (size_t i = 0; i < expected.size(); ++i) {
      expect_bit_equal(actual[i], expected[i]);
    }
  });
}

TEST_CASE("a step that cannot be captured is refused, with what it does and the remedy") {
  run_on_gpu([](c10::Device device) {
    const StepCase plain = step_cases()[1];
    const auto expect_refused = [&](const std::function<void(Training&, int call)>& also, const std::string& part) {
      Training training(plain, device);
      training.batch.zero_();
      int calls = 0;
      CapturedStep captured(*training.optimizer,
                            [&] {
                              also(training, ++calls);
                              return training.step();
                            },
                            {.device = device, .warmup = 2});
      captured();
      captured();
      expect_throws<NotImplementedError>([&] { captured(); }, part);
      expect_throws<StateError>([&] { captured(); }, "an earlier call has failed");
    };
    expect_refused([](Training& training, int) { training.batch.sum().item(); }, "read no values");
    expect_refused([](Training& training, int call) { training.set_lr(call); }, "set it between steps");
    expect_refused([](Training& training, int call) { training.tower->out->weight.set_requires_grad(call > 2); },
                   "makes step 1 of a parameter that the calls before it did not step");
  });
}

TEST_CASE("CapturedStep refuses the CPU, several ranks and too few calls before the capture") {
  const auto make = [](const CapturedStepOptions& options) {
    const auto param = at::ones({3}).requires_grad_();
    optim::FusedAdamW optimizer({param});
    CapturedStep(
        optimizer, [&] { return param; }, options);
  };
  run_ranks(1, [&](int) {
    expect_throws<NotImplementedError>([&] { make({.device = at::kCPU}); }, "a step on cpu cannot be captured");
    expect_throws<ValueError>([&] { make({.warmup = 1}); }, "warmup is 1; at least 2");
  });
  run_ranks(2, [&](int) { expect_throws<NotImplementedError>([&] { make({}); }, "there are 2 ranks"); });
}

}  // namespace tessera::testing
