// FullyShardedDataParallel: gradients that add up before they are reduced.

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>

#include <chrono>

#include "base/error.h"
#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "fsdp1/comm_hooks.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/replicate.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/reference/wrapped_tower.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

TEST_CASE("row 98: no_sync sends no gradients; k micro-batches are one batch; scopes nest and restore") {
  const int world_size = GENERATE(2, 4);
  run_ranks(world_size, [&](int) {
    auto reference = make_tower();
    average_reference(*reference, world_size, [&](int rank) {
      for (int i = 0; i < 3; ++i) {
        weighted_loss(reference(make_batch(static_cast<uint64_t>(10 * i + rank), 3, 5))).backward();
      }
    });
    const auto model = make_model();
    const auto micro_batch = [&](int i) {
      weighted_loss(model(make_batch(static_cast<uint64_t>(10 * i + get_rank()), 3, 5))).backward();
    };
    reset_comm_stats();
    model.no_sync([&] {
      micro_batch(0);
      model.no_sync([&] { micro_batch(1); });
    });
    expect_equal(comm_stats()[Collective::ReduceScatter].calls, 0);
    micro_batch(2);
    expect_equal(comm_stats()[Collective::ReduceScatter].calls, 3);
    check_sharded_parity(*reference, *model);
    expect_throws<Error>([&] { model.no_sync([] { throw Error("from inside"); }); }, "from inside");
    model->zero_grad();
    run_backward(model);
    check_sharded_parity(*reference_after_backward(), *model);
  });
}

TEST_CASE("after a backward that threw, scopes are open, and training goes on") {
  run_ranks(2, [](int) {
    const auto model = make_model();
    bool fails = true;
    auto handle = hook_point(*model->blocks[1], "test").register_forward_hook([&](HookPoint&, TensorRefs outputs) {
      outputs[0]->register_hook([&fails](const at::Tensor& grad) {
        TESSERA_CHECK(Error, !fails, "on purpose");
        return grad;
      });
    });
    const auto in_no_sync = [&] { model.no_sync([&] { run_backward(model); }); };
    for (int i = 0; i < 2; ++i) {  // the second one finds what the first left
      expect_throws<Error>(in_no_sync, "on purpose");
      TESSERA_EXPECT(model.training_state() == TrainingState::IDLE);
    }
    FSDP::summon_full_params(*model, {}, [&] { expect_bit_equal(model->out->bias, make_tower()->out->bias); });
    fails = false;
    model->zero_grad();
    in_no_sync();
    run_backward(model);
    auto reference = reference_after_backward();
    for (auto& param : reference->parameters()) {
      param.mutable_grad() = param.grad() * 2;
    }
    check_sharded_parity(*reference, *model);
  });
}

TEST_CASE("rows 98, 116: no_sync is for the root, and for those who leave its setting alone") {
  run_ranks(2, [](int) {
    const auto model = make_model();
    run_backward(model);
    const auto child = FSDP::fsdp_modules(*model)[1];
    expect_throws<StateError>([&] { child.no_sync([] {}); }, "is a unit of a larger model");
    expect_throws<StateError>([&] { model.no_sync([&] { fsdp(*model).set_requires_gradient_sync(true); }); },
                              "was switched on inside");
  });
}

TEST_CASE("row 99: no_sync with cpu_offload: gradients are handed out, on the CPU, by the sync") {
  const int world_size = GENERATE(2, 4);
  run_ranks(world_size, [](int) {
    const auto model = make_model({.cpu_offload = {.offload_params = true}});
    const auto reference = reference_after_backward();
    const auto expect_sum_of = [&](int count) {
      for (const auto& parameter : model->parameters()) {
        TESSERA_EXPECT(is_dtensor(parameter.grad()) && to_local(parameter.grad()).is_cpu());
      }
      for (auto& parameter : reference->parameters()) {
        parameter.mutable_grad() = parameter.grad() * count;
      }
      check_sharded_parity(*reference, *model);
      for (auto& parameter : reference->parameters()) {
        parameter.mutable_grad() = parameter.grad() / count;
      }
    };
    reset_comm_stats();
    model.no_sync([&] {
      run_backward(model);
      run_backward(model);
      // Unsharded, where they were computed: nothing to step on yet.
      for (const auto& parameter : model->parameters()) {
        TESSERA_EXPECT(!parameter.grad().defined());
      }
      expect_throws<StateError>([&] { fsdp(*model).check_ready_for_step(); }, "await their reduction");
    });
    expect_equal(comm_stats()[Collective::ReduceScatter].calls, 0);
    run_backward(model);
    expect_equal(comm_stats()[Collective::ReduceScatter].calls, 3);
    expect_sum_of(3);
    // Without no_sync they add up too, where PyTorch's first FSDP replaces them.
    run_backward(model);
    expect_sum_of(4);
  });
}

TEST_CASE("units of fully_shard or replicate below a wrapped model: no_sync, state dicts and hooks") {
  const bool replicates = GENERATE(false, true);
  run_ranks(2, [&](int) {
    auto tower = make_tower();
    const auto mesh = init_device_mesh(at::kCPU, {2});
    replicates ? replicate(tower->blocks[1], {.mesh = mesh}) : fully_shard(tower->blocks[1], {.mesh = mesh});
    const TowerModel model(tower);
    reset_comm_stats();
    model.no_sync([&] { run_backward(model); });
    expect_equal(comm_stats()[Collective::ReduceScatter].calls, 0);
    expect_equal(comm_stats()[Collective::AllReduce].calls, 0);
    run_backward(model);
    expect_equal(comm_stats()[Collective::ReduceScatter].calls, replicates ? 1 : 2);
    expect_equal(comm_stats()[Collective::AllReduce].calls, replicates ? 1 : 0);
    const auto reference = reference_after_backward();
    for (auto& parameter : reference->parameters()) {
      parameter.mutable_grad().mul_(2);
    }
    check_sharded_parity(*reference, *model);
    FSDP::state_dict_type(*model, StateDictSettings::make(StateDictType::SHARDED_STATE_DICT), [&] {
      const auto state = FSDP::state_dict(*model);
      expect_equal(state.size(), 14u);
      FSDPStateDict doubled;
      for (const auto& item : state) {
        const bool is_replica = replicates && item.key().starts_with("block1.");
        expect_equal(is_dtensor(item.value()), !is_replica);  // as with NO_SHARD
        TESSERA_EXPECT(is_replica || placements(item.value()) == Placements{Shard(0)});
        doubled.insert(item.key(), item.value() * 2);
      }
      FSDP::load_state_dict(*model, doubled);
    });
    const auto plain = make_tower()->named_parameters();
    for (const auto& item : FSDP::state_dict(*model)) {  // full
      expect_bit_equal(item.value(), plain[item.key()].detach() * 2);
    }
    FSDP::state_dict_type(*model, StateDictSettings::make(StateDictType::LOCAL_STATE_DICT), [&] {
      expect_throws<StateError>([&] { FSDP::state_dict(*model); }, "'block1' is a unit of fully_shard or replicate");
    });
    expect_throws<NotImplementedError>([&] { model.register_comm_hook(default_hook(DefaultState(default_group()))); },
                                       "'block1' is a unit of fully_shard or replicate");
  });
}

TEST_CASE("an entry that fits on one rank alone is an error on all, also where the first unit has one rank") {
  run_ranks(2,
            [](int rank) {
              auto tower = make_tower();
              fully_shard(tower->in, {.mesh = init_device_mesh(at::kCPU, {1}, {"own"}, {rank})});
              const TowerModel model(tower);
              const auto state = FSDP::state_dict(*model);
              FSDPStateDict given;
              for (const auto& item : state) {
                given.insert(item.key(), rank == 1 && item.key() == "out.bias" ? at::zeros({99}) : item.value());
              }
              expect_throws<ValueError>([&] { FSDP::load_state_dict(*model, given); }, "load_state_dict: ");
              FSDP::load_state_dict(*model, state);
            },
            {.timeout = std::chrono::seconds(20)});
}

}  // namespace tessera::testing
