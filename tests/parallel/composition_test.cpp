// Tensor-parallel plans, then activation checkpointing, then fully_shard: on meshes of two and three axes models train
// as on one process. float64, so that only the order of additions differs.

#include <ATen/TensorOperators.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>
#include <torch/optim/adam.h>

#include "activation_checkpoint/checkpoint.h"
#include "dtensor/clip_grad_norm.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/replicate.h"
#include "parallel/linear_styles.h"
#include "parallel/parallelize_module.h"
#include "parallel/sequence_parallel.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/parallel/llama.h"
#include "tests/parallel/tp_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// A model, what is cut where, and the loss of one batch.
struct Setup {
  std::shared_ptr<torch::nn::Module> model;
  /// Modules that become units of fully_shard, and are checkpointed if asked for; the model itself is the last unit.
  std::vector<std::shared_ptr<torch::nn::Module>> units;
  ParallelPlan plan;
  std::function<at::Tensor(uint64_t batch)> loss;
};

Setup mlp_stack(int64_t dim, bool sequence_parallel) {
  auto stack = make_mlp_stack(dim, sequence_parallel);
  fill_in_double(*stack, 42);
  return {.model = stack.ptr(),
          .units = {stack->ptr(0), stack->ptr(1), stack->ptr(2)},
          .plan = mlp_stack_plan(sequence_parallel),
          .loss = [stack, dim](uint64_t batch) mutable {
            return weighted_loss(whole(stack(make_input(batch, {3, 5, dim}))));
          }};
}

Setup llama(const LlamaConfig& config) {
  Llama model(config);
  fill_in_double(*model, 12);
  Setup setup{.model = model.ptr(), .units = {}, .plan = llama_plan(), .loss = [model](uint64_t batch) mutable {
                const auto draw = [&](uint64_t seed) {
                  return at::randint(model->config.vocabulary, {2, 7}, make_generator(seed), at::kLong);
                };
                const auto logits = model(draw(batch));
                const auto labels = is_dtensor(logits)
                                        ? distribute_tensor(draw(batch + 50), device_mesh(logits), {Replicate()})
                                        : draw(batch + 50);
                return whole(at::cross_entropy_loss(logits.flatten(0, 1), labels.flatten()));
              }};
  for (const auto& block : model->blocks) {
    setup.units.push_back(block.ptr());
  }
  return setup;
}

using DataParallel = std::function<void(torch::nn::Module&, const DeviceMesh&)>;

void shard_data(torch::nn::Module& module, const DeviceMesh& data) {
  fully_shard(module, {.mesh = data});
}

void replicate_data(torch::nn::Module& module, const DeviceMesh& data) {
  replicate(module, {.mesh = data});
}

void compare_modules(const torch::nn::Module& reference, const torch::nn::Module& sharded, bool gradients) {
  const auto expected = reference.named_parameters();
  const auto actual = sharded.named_parameters();
  double largest = 0;
  for (const auto& item : expected) {
    const auto& parameter = actual[item.key()];
    expect_close(whole(parameter.detach()), item.value().detach(), kDoubleTolerance);
    if (gradients) {
      expect_close(whole(parameter.grad()), item.value().grad(), kDoubleTolerance);
      largest = std::max(largest, item.value().grad().abs().max().item<double>());
    }
  }
  TESSERA_EXPECT(!gradients || largest > 1e-6);
}

/// Ranks along "tp" have the same batches, those along `data` different ones.
void train_composed(const std::function<Setup()>& make, const DeviceMesh& tp, const DeviceMesh& data,
                    const DataParallel& distribute, bool checkpointed) {
  auto reference = make(), sharded = make();
  parallelize_module(*sharded.model, tp, sharded.plan);
  for (const auto& unit : sharded.units) {
    if (checkpointed) {
      checkpoint_module(*unit);
    }
    distribute(*unit, data);
  }
  distribute(*sharded.model, data);
  torch::optim::Adam reference_optimizer(reference.model->parameters(), 0.02);
  torch::optim::Adam optimizer(sharded.model->parameters(), 0.02);
  for (uint64_t step = 0; step < 3; ++step) {
    const auto batch = [&](int64_t rank) { return 100 + 10 * step + static_cast<uint64_t>(rank); };
    reference_optimizer.zero_grad();
    optimizer.zero_grad();
    at::Tensor expected;
    for (int64_t rank = 0; rank < data.size(); ++rank) {
      const auto loss = reference.loss(batch(rank));
      expected = rank == data.local_rank() ? loss.detach() : expected;
      (loss / data.size()).backward();
    }
    const auto loss = sharded.loss(batch(data.local_rank()));
    expect_close(loss.detach(), expected, kDoubleTolerance);
    TESSERA_EXPECT(std::abs(expected.item<double>()) > 1e-6);
    loss.backward();
    compare_modules(*reference.model, *sharded.model, /*gradients=*/true);
    const auto norm = clip_grad_norm_(sharded.model->parameters(), 0.1);
    expect_close(norm, clip_grad_norm_(reference.model->parameters(), 0.1), kDoubleTolerance);
    reference_optimizer.step();
    optimizer.step();
    compare_modules(*reference.model, *sharded.model, /*gradients=*/false);
  }
}

}  // namespace

TEST_CASE("the stack of Mlps in two dimensions", "[parallel]") {
  for (const bool sequence_parallel : {false, true}) {
    run_ranks(4, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
      for (const int64_t dim : {3, 16, 17}) {
        for (const bool checkpointed : {false, true}) {
          train_composed([&] { return mlp_stack(dim, sequence_parallel); }, mesh["tp"], mesh["dp"], shard_data,
                         checkpointed);
        }
      }
      train_composed([&] { return mlp_stack(17, sequence_parallel); }, mesh["tp"], mesh["dp"], replicate_data, false);
    });
  }
}

TEST_CASE("a LLaMA-style model in two dimensions", "[parallel]") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    for (const bool checkpointed : {false, true}) {
      train_composed([] { return llama({.heads = 4, .kv_heads = 2}); }, mesh["tp"], mesh["dp"], shard_data,
                     checkpointed);
      train_composed([] { return llama({.heads = 3, .kv_heads = 1}); }, mesh["tp"], mesh["dp"], shard_data,
                     checkpointed);
    }
  });
}

TEST_CASE("a LLaMA-style model in three dimensions", "[parallel]") {
  run_ranks(8, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2, 2}, {"replicate", "shard", "tp"});
    train_composed([] { return llama({.heads = 4, .kv_heads = 2}); }, mesh["tp"], mesh[{"replicate", "shard"}],
                   shard_data, true);
    train_composed([] { return mlp_stack(17, true); }, mesh["tp"], mesh[{"replicate", "shard"}], shard_data, false);
  });
}

}  // namespace tessera::testing
