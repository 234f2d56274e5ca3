// The stack of uneven Mlps under tensor parallelism and data parallelism together, against one process. Units exchange
// DTensors, and with sequence parallelism the root's output is one. After test_train_parity_2d_mlp of PyTorch's
// test_replicate_with_fsdp.py, with another loss: under the sum of relu outputs the network dies within a few steps,
// and zeros equal zeros.

#include <ATen/TensorOperators.h>
#include <torch/optim/adam.h>

#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/replicate.h"
#include "nn/hooks/hook_point.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/parallel/tp_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

struct StackOptions {
  int64_t dim;
  bool sequence_parallel;
  bool checkpoints = false;
};

nn::Sequential filled_stack(const StackOptions& options) {
  auto stack = make_mlp_stack(options.dim, options.sequence_parallel);
  fill_in_double(*stack, 42);
  return stack;
}

/// Pulls outputs towards 2, so that relu does not end the training.
at::Tensor loss_of(nn::Sequential& stack, const at::Tensor& input) {
  return weighted_loss(whole(stack(input)) - 2);
}

/// Adds gradients of the average over the ranks of `dp`; returns the loss of this one.
at::Tensor average_backward(nn::Sequential& reference, const DeviceMesh& dp,
                            const std::function<at::Tensor(int64_t)>& input) {
  at::Tensor own;
  for (int64_t rank = 0; rank < dp.size(); ++rank) {
    const auto loss = loss_of(reference, input(rank));
    own = rank == dp.local_rank() ? loss.detach() : own;
    (loss / static_cast<double>(dp.size())).backward();
  }
  return own;
}

void train_stack_beside_reference(const DeviceMesh& dp, const DeviceMesh& tp, const StackOptions& options,
                                  const ShardFn& shard = nullptr) {
  auto reference = filled_stack(options), stack = filled_stack(options);
  parallelize_mlp_stack(
      stack, {.tp_mesh = tp, .dp_mesh = dp, .use_activation_checkpointing = options.checkpoints, .shard = shard});
  expect_equal(find_hook_point(*stack->ptr(0))->is_forward_wrapped(), options.checkpoints);
  const torch::optim::AdamOptions adam(1e-2);
  torch::optim::Adam optimizer(stack->parameters(), adam), reference_optimizer(reference->parameters(), adam);
  for (int step = 0; step < 10; ++step) {
    // Ranks along tp have the same data.
    const auto input = [&](int64_t rank) { return make_input(43 + 100 * step + rank, {8, 5, options.dim}); };
    const bool to_none = step % 2 == 0;
    reference->zero_grad(to_none);
    optimizer.zero_grad(to_none);
    for (const auto& param : stack->parameters()) {  // zeros that backward adds to are DTensors that stay
      TESSERA_EXPECT(to_none ? !param.grad().defined()
                             : is_dtensor(param.grad()) && full_tensor(param.grad()).abs().max().item<double>() == 0);
    }
    const auto expected = average_backward(reference, dp, input);
    auto loss = loss_of(stack, input(dp.local_rank()));
    loss.backward();
    expect_close(loss.detach(), expected, kDoubleTolerance);
    TESSERA_EXPECT(loss.item<double>() != 0);
    TESSERA_EXPECT(full_tensor(stack->named_parameters()["0.in_proj.weight"].grad()).abs().max().item<double>() > 1e-6);
    check_sharded_parity(reference, stack, {.tolerance = kDoubleTolerance});
    optimizer.step();
    reference_optimizer.step();
    check_sharded_parity(reference, stack, {.tolerance = kDoubleTolerance});
  }
}

}  // namespace

TEST_CASE("rows 27, 28, 120: replicate and fully_shard over the stack under tensor parallelism equal one process",
          "[composability]") {
  const auto dim = GENERATE(int64_t{3}, int64_t{16}, int64_t{17});
  const bool sequence_parallel = GENERATE(false, true), checkpoints = GENERATE(false, true);
  const StackOptions options{dim, sequence_parallel, checkpoints};
  CAPTURE(dim, sequence_parallel, checkpoints);
  run_ranks(4, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 1, 2}, {"replicate", "shard", "tp"});
    const auto replicas = mesh["replicate"];
    const ShardFn replicated = [](torch::nn::Module& module, const FullyShardOptions& unit) {
      replicate(module, {.mesh = unit.mesh});
    };
    train_stack_beside_reference(replicas, mesh["tp"], options, replicated);
    train_stack_beside_reference(replicas, mesh["tp"], options);
    train_stack_beside_reference(mesh[{"replicate", "shard"}], mesh["tp"], options);
  });
}

TEST_CASE("rows 27, 120: the stack on uneven and 3-D meshes equals one process", "[composability]") {
  const auto shape =
      GENERATE(std::vector<int64_t>{1, 3, 2}, std::vector<int64_t>{1, 2, 3}, std::vector<int64_t>{2, 2, 2});
  const bool sequence_parallel = GENERATE(false, true);
  CAPTURE(shape, sequence_parallel);
  run_ranks(static_cast<int>(shape[0] * shape[1] * shape[2]), [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, shape, {"replicate", "shard", "tp"});
    train_stack_beside_reference(mesh[{"replicate", "shard"}], mesh["tp"], {17, sequence_parallel});
  });
}

}  // namespace tessera::testing
