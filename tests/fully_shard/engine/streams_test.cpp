// What the engine gives a GPU's streams, seen on a simulated one (testing/simulated_gpu): every case here, and all
// others over devices, fails where work on one stream touches what another one has not finished.

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/optim/sgd.h>

#include "comm/collectives.h"
#include "dtensor/dtensor.h"
#include "fully_shard/replicate.h"
#include "optim/fused_optimizers.h"
#include "testing/expect.h"
#include "testing/fsdp_models/patches.h"
#include "testing/run_ranks.h"
#include "testing/simulated_gpu/simulated_gpu.h"
#include "testing/tensor_matchers.h"
#include "testing/test_devices.h"
#include "tests/fully_shard/models/small_models.h"
#include "tests/fully_shard/models/train_and_compare.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

const c10::Device kGpu(c10::kCUDA, 0);

/// Runs `body` on ranks that share a GPU, each with a current stream of its own.
void run_on_streams(int world_size, const std::function<void(int)>& body) {
  run_ranks(world_size, [&](int rank) {
    const OwnStream stream(kGpu);
    body(rank);
  });
}

std::vector<at::Tensor> batches(int rank, int count) {
  std::vector<at::Tensor> result;
  result.reserve(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    result.push_back(make_batch(10 * static_cast<uint64_t>(rank) + static_cast<uint64_t>(i), 3, 5).to(kGpu));
  }
  return result;
}

void fill_and_move(Tower& tower) {
  fill_parameters(*tower, 1);
  tower->to(kGpu);
}

/// Units that share all-reduces.
void replicate_blocks(Tower& tower, const ReplicateOptions& options) {
  for (auto& block : tower->blocks) {
    replicate(*block, options);
  }
  replicate(*tower, options);
}

}  // namespace

TEST_CASE("streams: ranks on streams of their own equal one process, whatever is gathered and reduced") {
  const auto reshard = GENERATE(ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2));
  CAPTURE(reshard.to_string());
  run_on_streams(4, [&](int rank) {
    const auto mesh = init_device_mesh(at::kCUDA, {4});
    train_and_compare(rank, 4, OptimizerBuilt::AfterSharding, {.mesh = mesh, .reshard_after_forward = reshard});
  });
}

TEST_CASE("streams: replicas of shards, and replicate, equal one process") {
  run_on_streams(4, [&](int rank) {
    const auto mesh = init_device_mesh(at::kCUDA, {2, 2}, {"replicate", "shard"});
    train_and_compare(rank, 4, OptimizerBuilt::AfterSharding, {.mesh = mesh});
    const ReplicateOptions options{.mesh = init_device_mesh(at::kCUDA, {4})};
    train_and_compare({.rank = rank, .world_size = 4, .device = at::kCUDA, .shard_ranks = 4},
                      OptimizerBuilt::AfterSharding, [&](Tower& tower) { replicate_blocks(tower, options); });
  });
}

TEST_CASE("streams: replicas of one rank, which send nothing, equal one process") {
  run_on_streams(1, [&](int rank) {
    const ReplicateOptions options{.mesh = init_device_mesh(at::kCUDA, {1})};
    train_and_compare({.rank = rank, .world_size = 1, .device = at::kCUDA, .shard_ranks = 1},
                      OptimizerBuilt::AfterSharding, [&](Tower& tower) { replicate_blocks(tower, options); });
  });
}

// So each step writes to new memory, and here to memory that the stream that computes has just used.
TEST_CASE("streams: gradients that the program keeps are not written again") {
  run_on_streams(4, [&](int rank) {
    Tower tower;
    fill_and_move(tower);
    shard_tower(tower, {.mesh = init_device_mesh(at::kCUDA, {4}), .mp_policy = {.reduce_dtype = at::kBFloat16}});
    int64_t numel = 1;  // of a block's flat gradient
    fsdp(tower).set_event_observer([&](const FSDPEvent& event) {
      if (event.step == FSDPEventKind::Reshard) {
        at::ones({numel}, kGpu);
      }
    });
    std::vector<at::Tensor> kept;
    for (int step = 0; step < 3; ++step) {
      weighted_loss(tower(batches(rank, 1)[0])).backward();
      for (const auto& param : tower->parameters()) {
        kept.push_back(to_local(param.grad()));
      }
      numel = static_cast<int64_t>(to_local(tower->blocks[0]->up->weight.grad()).storage().nbytes() / sizeof(float));
      tower->zero_grad();
    }
    const size_t count = tower->parameters().size();
    for (size_t i = 0; i < count; ++i) {
      expect_bit_equal(kept[i].cpu(), kept[count + i].cpu());
      expect_bit_equal(kept[i].cpu(), kept[2 * count + i].cpu());
    }
  });
}

TEST_CASE("streams: the host waits for nothing in a steady step") {
  const auto [world_size, reshard] =
      GENERATE(std::pair(1, ReshardAfterForward(true)), std::pair(2, ReshardAfterForward(false)),
               std::pair(3, ReshardAfterForward(true)), std::pair(4, ReshardAfterForward(2)));
  const bool is_mixed = GENERATE(false, true);
  CAPTURE(world_size, is_mixed, reshard.to_string());
  run_on_streams(world_size, [&, world_size = world_size, reshard = reshard](int rank) {
    Tower tower;
    fill_and_move(tower);
    FullyShardOptions options{.mesh = init_device_mesh(at::kCUDA, {world_size}), .reshard_after_forward = reshard};
    if (is_mixed) {
      options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    }
    shard_tower(tower, options);
    optim::FusedAdamW optimizer(tower->parameters(), torch::optim::AdamWOptions(1e-2));
    const auto inputs = batches(rank, 4);
    for (size_t step = 0; step < inputs.size(); ++step) {
      barrier(default_group());
      if (step == 2) {
        simulated_gpu::forget_host_waits();
        barrier(default_group());
      }
      optimizer.zero_grad();
      tower(inputs[step]).square().sum().backward();
      optimizer.step();
    }
    barrier(default_group());
    expect_equal(simulated_gpu::host_waits(), std::vector<std::string>{});
  });
}

// The probe is written by the stream that computes, when a unit's forward begins. The gather of the unit after the next
// is issued while that runs.
TEST_CASE("streams: a gather does not wait for what is computed before it is issued") {
  run_on_streams(2, [&](int rank) {
    Tower tower(17, 13, 4);
    fill_and_move(tower);
    shard_tower(tower, {.mesh = init_device_mesh(at::kCUDA, {2})});
    at::Tensor probe;
    fsdp(tower).set_event_observer([&](const FSDPEvent& event) {
      if (event.step == FSDPEventKind::Forward) {
        probe = at::ones({1}, kGpu);
      }
    });
    int beside = 0;
    const auto patch = patch_all_gather([&](const AllGatherFn& original, const at::Tensor& output,
                                            const at::Tensor& input, const ProcessGroupPtr& group) {
      if (probe.defined()) {
        try {
          const at::Tensor sum = probe + 1;
        } catch (const Error& race) {
          TESSERA_EXPECT(std::string(race.what()).find("without waiting until") != std::string::npos);
          ++beside;
        }
      }
      return original(output, input, group);
    });
    const auto inputs = batches(rank, 2);
    tower(inputs[0]).square().sum().backward();
    probe = at::Tensor();
    beside = 0;
    const auto loss = tower(inputs[1]).square().sum();
    TESSERA_EXPECT(beside >= 3);
    fsdp(tower).set_event_observer({});
    probe = at::Tensor();
    loss.backward();
  });
}

// Both probes are written and read on what is the current stream then: that of the engine in the hook, and the one that
// computes in the observer, which sees backward's steps.
TEST_CASE("streams: reductions are finished beside what is computed") {
  const bool has_replicas = GENERATE(false, true);
  CAPTURE(has_replicas);
  run_on_streams(has_replicas ? 4 : 2, [&](int rank) {
    Tower tower(17, 13, 6);
    fill_and_move(tower);
    shard_tower(tower, {.mesh = has_replicas ? init_device_mesh(at::kCUDA, {2, 2}, {"replicate", "shard"})
                                             : init_device_mesh(at::kCUDA, {2})});
    at::Tensor computed, reduced;
    std::vector<at::Tensor> probes;  // kept, as they are read on other streams than those they are of
    const auto new_probe = [&] { return probes.emplace_back(at::ones({1}, kGpu)); };
    int computed_beside = 0, reduced_beside = 0;
    const auto is_beside = [](const at::Tensor& probe) {
      try {
        const at::Tensor sum = probe + 1;
        return 0;
      } catch (const Error& race) {
        TESSERA_EXPECT(std::string(race.what()).find("without waiting until") != std::string::npos);
        return 1;
      }
    };
    fsdp(tower).set_event_observer([&](const FSDPEvent& event) {
      if (event.step == FSDPEventKind::Backward || event.step == FSDPEventKind::Reshard) {
        reduced_beside += reduced.defined() ? is_beside(reduced) : 0;
        reduced = at::Tensor();
        computed = new_probe();
      }
    });
    const auto hook = [&](const at::Tensor&) {
      computed_beside += computed.defined() ? is_beside(computed) : 0;
      reduced = new_probe();
    };
    for (auto& block : tower->blocks) {
      fsdp(block).set_all_reduce_hook(hook);
    }
    const auto loss = tower(batches(rank, 1)[0]).square().sum();
    computed = at::Tensor();
    loss.backward();
    TESSERA_EXPECT(computed_beside >= 3);
    TESSERA_EXPECT(reduced_beside >= 3);
    TESSERA_EXPECT(is_beside(reduced) == 0);
    fsdp(tower).set_event_observer({});
    c10::impl::VirtualGuardImpl(at::kCUDA).synchronizeDevice(0);
  });
}

TEST_CASE("streams: gradients that add up, sums that wait for their all-reduce, and casts equal one process") {
  run_on_streams(4, [&](int rank) {
    Tower reference, tower;
    fill_and_move(reference);
    fill_and_move(tower);
    shard_tower(tower, {.mesh = init_device_mesh(at::kCUDA, {2, 2}, {"replicate", "shard"})});
    torch::optim::SGD optimizer(tower->parameters(), 0.05), reference_optimizer(reference->parameters(), 0.05);
    for (int step = 0; step < 3; ++step) {
      for (int micro = 0; micro < 3; ++micro) {
        fsdp(tower).set_requires_all_reduce(micro != 1);
        weighted_loss(tower(batches(rank, 1)[0])).backward();
        for (int from = 0; from < 4; ++from) {
          (weighted_loss(reference(batches(from, 1)[0])) / 4).backward();
        }
      }
      optimizer.step();
      reference_optimizer.step();
      optimizer.zero_grad(/*set_to_none=*/step != 1);
      reference_optimizer.zero_grad();
    }
    const auto expected = reference->parameters(), actual = tower->parameters();
    for (size_t i = 0; i < expected.size(); ++i) {
      expect_close(full_tensor(actual[i].detach()).cpu(), expected[i].detach().cpu());
    }
  });
}

// Without parameters of its own the root waits for nothing at the end of a backward that is not the last one.
TEST_CASE("streams: sums that wait for their all-reduce are read before the next backward writes there") {
  const bool shards = GENERATE(true, false);
  run_on_streams(shards ? 4 : 2, [&](int rank) {
    Tower tower;
    fill_and_move(tower);
    const auto mesh =
        shards ? init_device_mesh(at::kCUDA, {2, 2}, {"replicate", "shard"}) : init_device_mesh(at::kCUDA, {2});
    const auto make_unit = [&](torch::nn::Module& module) {
      shards ? fully_shard(module, {.mesh = mesh}) : replicate(module, {.mesh = mesh});
    };
    for (auto& block : tower->blocks) {
      make_unit(*block);
    }
    make_unit(*tower->in);
    make_unit(*tower->norm);
    make_unit(*tower->out);
    make_unit(*tower);
    const auto inputs = batches(rank, 3);
    for (int i = 0; i < 3; ++i) {
      fsdp(tower).set_requires_all_reduce(i == 2);
      fsdp(tower).set_is_last_backward(i == 2);
      weighted_loss(tower(inputs[static_cast<size_t>(i)])).backward();
    }
    TESSERA_EXPECT(tower->in->weight.grad().defined());
  });
}

TEST_CASE("streams: a parameter that is changed between steps is gathered as it is then") {
  run_on_streams(2, [&](int rank) {
    Tower reference, tower;
    fill_and_move(reference);
    fill_and_move(tower);
    shard_tower(tower, {.mesh = init_device_mesh(at::kCUDA, {2}), .mp_policy = {.param_dtype = at::kFloat}});
    for (const auto& input : batches(rank, 3)) {
      const at::NoGradGuard no_grad;
      expect_bit_equal(tower(input), reference(input));
      for (auto* model : {&reference, &tower}) {
        for (auto& param : (*model)->parameters()) {
          param.mul_(0.5);
        }
      }
      fsdp(tower).unshard();
      fsdp(tower).reshard();
    }
  });
}

TEST_CASE("streams: a model may go after a backward that failed, with reductions on their way") {
  const bool has_replicas = GENERATE(false, true);
  const bool is_early = GENERATE(false, true);  // while the next unit is gathered
  CAPTURE(has_replicas, is_early);
  run_on_streams(4, [&](int rank) {
    const auto mesh =
        has_replicas ? init_device_mesh(at::kCUDA, {2, 2}, {"replicate", "shard"}) : init_device_mesh(at::kCUDA, {4});
    const auto input = batches(rank, 1)[0];
    std::vector<at::Tensor> grads;  // outlive it
    {
      Tower tower;
      fill_and_move(tower);
      shard_tower(tower, {.mesh = mesh});
      weighted_loss(tower(input)).backward();
      for (const auto& param : tower->parameters()) {
        grads.push_back(param.grad());
      }
      const auto& failing = is_early ? tower->blocks[1]->up->weight : tower->in->weight;
      failing.register_hook([](const at::Tensor& grad) {
        TESSERA_CHECK(Error, !grad.defined(), "on purpose");
        return grad;
      });
      expect_throws<Error>([&] { weighted_loss(tower(input)).backward(); }, "on purpose");
    }
    for (const auto& grad : grads) {
      to_local(grad).mul_(2);
    }
    grads.clear();
    for (int64_t numel = 1; numel < 1024; ++numel) {
      at::ones({numel}, kGpu);  // where they were
    }
  });
}

}  // namespace tessera::testing
