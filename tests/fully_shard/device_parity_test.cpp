// Sharded training equals one process on every device that there is: on a GPU the ranks share it.

#include <ATen/TensorOperators.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>

#include "dtensor/clip_grad_norm.h"
#include "dtensor/dtensor.h"
#include "fully_shard/replicate.h"
#include "parallel/parallelize_module.h"
#include "testing/expect.h"
#include "testing/fsdp_models/nested_wrapped_models.h"
#include "testing/fsdp_models/parity_driver.h"
#include "testing/fsdp_models/transformer_with_shared_params.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "testing/test_devices.h"
#include "tests/fully_shard/models/small_models.h"
#include "tests/fully_shard/models/train_and_compare.h"
#include "tests/parallel/tp_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using MeshShape = std::vector<int64_t>;

int ranks_of(const MeshShape& shape) {
  return static_cast<int>(c10::multiply_integers(shape));
}

}  // namespace

TEST_CASE("devices: fully_shard equals one process bit for bit over 10 Adam steps") {
  const int world_size = GENERATE(1, 2, 3, 4);
  const bool reshard_after_forward = GENERATE(true, false);
  for (const auto device : test_devices()) {
    CAPTURE(world_size, reshard_after_forward, device);
    run_ranks(world_size, [&](int rank) {
      const auto mesh = init_device_mesh(device.type(), {world_size});
      train_and_compare(rank, world_size, OptimizerBuilt::BeforeSharding,
                        {.mesh = mesh, .reshard_after_forward = reshard_after_forward});
    });
  }
}

TEST_CASE("devices: replicas of shards, and cuts of another dim, equal one process") {
  const auto shape = GENERATE(MeshShape{2, 2}, MeshShape{1, 3}, MeshShape{3, 1});
  const bool last_dim = GENERATE(false, true);
  for (const auto device : test_devices()) {
    CAPTURE(shape, last_dim, device);
    run_ranks(ranks_of(shape), [&](int rank) {
      const auto mesh = init_device_mesh(device.type(), shape, {"replicate", "shard"});
      FullyShardOptions options{.mesh = mesh};
      if (last_dim) {
        options.shard_placement_fn = [](const at::Tensor& param) { return std::optional(Shard(param.dim() - 1)); };
      }
      train_and_compare(rank, ranks_of(shape), OptimizerBuilt::AfterSharding, options);
    });
  }
}

TEST_CASE("devices: replicate equals one process") {
  for (const auto device : test_devices()) {
    CAPTURE(device);
    run_ranks(3, [&](int rank) {
      const ReplicateOptions options{.mesh = init_device_mesh(device.type(), {3})};
      train_and_compare({.rank = rank, .world_size = 3, .device = device.type(), .shard_ranks = 3},
                        OptimizerBuilt::AfterSharding, [&](Tower& tower) { replicate(*tower, options); });
    });
  }
}

namespace {

void check_common_model(const ModelClass& model, c10::Device device, const MixedPrecisionPolicy& policy = {}) {
  CAPTURE(model.name, device);
  run_ranks(2, [&](int) {
    FSDPParityOptions options{.mesh = init_device_mesh(device.type(), {2}), .num_iters = 3};
    options.fsdp_options.mp_policy = policy;
    options.init_options.device = device;
    test_fsdp_parity(model, options);
  });
}

}  // namespace

TEST_CASE("devices: the common models train as the plain ones, also with parameters in lower precision") {
  for (const auto device : test_devices()) {
    check_common_model(nested_wrapped_model(), device);
    check_common_model(always_wrap_nested_wrapped_model(), device);
    check_common_model(transformer_with_shared_params(), device);
    check_common_model(nested_wrapped_model(), device, {.param_dtype = at::kBFloat16});
  }
}

TEST_CASE("devices: clipping the gradients of units equals clipping one process's") {
  for (const auto device : test_devices()) {
    CAPTURE(device);
    run_ranks(3, [&](int rank) {
      Tower reference, sharded;
      for (auto* tower : {&reference, &sharded}) {
        fill_parameters(**tower, 1);
        (*tower)->to(device);
      }
      shard_tower(sharded, {.mesh = init_device_mesh(device.type(), {3})});
      const auto batch = [&](int r) { return make_batch(100 + r, 3, 5).to(device); };
      average_reference(*reference, 3, [&](int r) { weighted_loss(reference(batch(r))).backward(); });
      weighted_loss(sharded(batch(rank))).backward();
      const double expected = torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.1);
      const auto norm = clip_grad_norm_(sharded->parameters(), 0.1);
      TESSERA_EXPECT(expected > 0.2);
      TESSERA_EXPECT(std::abs(norm.item<double>() - expected) < 1e-5 * expected);
      check_sharded_parity(reference, sharded, {.tolerance = {.rtol = 1e-5, .atol = 1e-7}});
    });
  }
}

namespace {

/// Four steps of Adam under data and tensor parallelism against one process, in float64.
void train_stack_in_2d(c10::Device device, const MeshShape& shape, bool sequence_parallel) {
  constexpr Tolerance kTight{.rtol = 1e-8, .atol = 1e-10};
  constexpr int64_t kDim = 16;
  const auto mesh = init_device_mesh(device.type(), shape, {"dp", "tp"});
  auto reference = make_mlp_stack(kDim, sequence_parallel), stack = make_mlp_stack(kDim, sequence_parallel);
  for (auto* module : {&reference, &stack}) {
    fill_in_double(**module, 42);
    (*module)->to(device);
  }
  parallelize_module(stack, mesh["tp"], mlp_stack_plan(sequence_parallel));
  for (const auto* name : {"0", "1", "2"}) {
    fully_shard(*stack->named_children()[name], {.mesh = mesh["dp"]});
  }
  fully_shard(*stack, {.mesh = mesh["dp"]});
  torch::optim::Adam optimizer(stack->parameters(), 1e-2), reference_optimizer(reference->parameters(), 1e-2);
  for (int step = 0; step < 4; ++step) {
    const auto input = [&](int64_t r) { return make_input(43 + 100 * step + r, {8, 5, kDim}).to(device); };
    reference->zero_grad();
    optimizer.zero_grad();
    for (int64_t r = 0; r < shape[0]; ++r) {
      (weighted_loss(reference(input(r)) - 2) / static_cast<double>(shape[0])).backward();
    }
    weighted_loss(whole(stack(input(mesh.local_rank("dp")))) - 2).backward();
    check_sharded_parity(reference, stack, {.tolerance = kTight});
    optimizer.step();
    reference_optimizer.step();
    check_sharded_parity(reference, stack, {.tolerance = kTight});
  }
}

}  // namespace

TEST_CASE("devices: a stack under tensor and data parallelism equals one process") {
  const auto shape = GENERATE(MeshShape{2, 2}, MeshShape{1, 3}, MeshShape{3, 2});
  const bool sequence_parallel = GENERATE(false, true);
  for (const auto device : test_devices()) {
    CAPTURE(shape, sequence_parallel, device);
    run_ranks(ranks_of(shape), [&](int) { train_stack_in_2d(device, shape, sequence_parallel); });
  }
}

// The optimizer's state, shards and gradients are on the host; on a GPU gradients come there while backward goes on.
TEST_CASE("devices: offloading to the CPU equals one process, with gradients of one backward or of two") {
  const bool pins = GENERATE(false, true);
  const bool is_mixed = GENERATE(false, true);
  const auto shape = GENERATE(MeshShape{1}, MeshShape{3}, MeshShape{2, 2});
  for (const auto device : test_devices()) {
    CAPTURE(pins, is_mixed, shape, device);
    run_ranks(ranks_of(shape), [&](int rank) {
      const int world_size = ranks_of(shape);
      Tower reference, sharded;
      for (auto* tower : {&reference, &sharded}) {
        fill_parameters(**tower, 1);
      }
      reference->to(device);
      const auto mesh = shape.size() == 1 ? init_device_mesh(device.type(), shape)
                                          : init_device_mesh(device.type(), shape, {"replicate", "shard"});
      FullyShardOptions options{.mesh = mesh, .offload_policy = CPUOffloadPolicy{.pin_memory = pins}};
      if (is_mixed) {
        options.mp_policy = {.param_dtype = at::kFloat, .reduce_dtype = at::kDouble};
      }
      shard_tower(sharded, options);
      torch::optim::Adam optimizer(sharded->parameters(), torch::optim::AdamOptions(1e-2));
      torch::optim::Adam reference_optimizer(reference->parameters(), torch::optim::AdamOptions(1e-2));
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        const auto batch = [&](int r) { return make_batch(100 + step * world_size + r, 3, 5).to(device); };
        const int backwards = 1 + step % 2;
        average_reference(*reference, world_size, [&](int r) {
          for (int i = 0; i < backwards; ++i) {
            weighted_loss(reference(batch(r))).backward();
          }
        });
        for (int i = 0; i < backwards; ++i) {
          weighted_loss(sharded(batch(rank))).backward();
        }
        const auto expected = reference->named_parameters();
        for (const auto& item : sharded->named_parameters()) {
          const auto grad = to_local(item.value().grad());
          TESSERA_EXPECT(grad.is_cpu() && grad.scalar_type() == at::kFloat);
          TESSERA_EXPECT(grad.numel() == 0 || grad.is_pinned() == (pins && !device.is_cpu()));
          expect_close(full_tensor(item.value().grad()), expected[item.key()].grad().cpu(),
                       {.rtol = 1e-4, .atol = 1e-6});
        }
        optimizer.step();
        reference_optimizer.step();
        for (const auto& item : sharded->named_parameters()) {
          expect_close(full_tensor(item.value().detach()), expected[item.key()].detach().cpu(),
                       {.rtol = 1e-4, .atol = 1e-5});
        }
      }
    });
  }
}

}  // namespace tessera::testing
