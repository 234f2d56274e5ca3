// FullyShardedDataParallel: full parameters for a while, and which state allows what.

#include <ATen/core/grad_mode.h>

#include "dtensor/dtensor.h"
#include "fully_shard/replicate.h"
#include "nn/sequential.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/reference/wrapped_tower.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

void expect_values(const torch::nn::Module& actual, const torch::nn::Module& expected) {
  const auto wanted = expected.named_parameters();
  for (const auto& item : actual.named_parameters()) {
    TESSERA_EXPECT(!is_dtensor(item.value()));
    expect_bit_equal(item.value().detach(), wanted[item.key()].detach());
  }
}

}  // namespace

TEST_CASE("rows 89, 96: summon_full_params shows full parameters under plain names, and gives the shards back") {
  for (const int world_size : {1, 2, 4}) {
    run_ranks(world_size, [](int) {
      const auto plain = make_tower();
      const auto model = make_model();
      const auto before = to_local(model->in->weight.detach()).clone();
      FSDP::summon_full_params(*model, {}, [&] {
        expect_values(*model, *plain);
        expect_equal(model->named_parameters().keys(), plain->named_parameters().keys());
        TESSERA_EXPECT(model.training_state() == TrainingState::SUMMON_FULL_PARAMS);
      });
      expect_bit_equal(to_local(model->in->weight.detach()), before);
      TESSERA_EXPECT(model.training_state() == TrainingState::IDLE);
      FSDP::summon_full_params(*model, {.recurse = false}, [&] {
        TESSERA_EXPECT(!is_dtensor(model->in->weight) && is_dtensor(model->blocks[0]->up->weight));
      });
      FSDP::summon_full_params(*model->blocks[1], {}, [&] {
        TESSERA_EXPECT(is_dtensor(model->in->weight) && !is_dtensor(model->blocks[1]->up->weight));
      });
      run_backward(model);
      check_sharded_parity(*reference_after_backward(), *model);
    });
  }
}

TEST_CASE("row 90: summon_full_params writes back this rank's rows, or not; what is not sharded stays changed") {
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [&](int) {
      const at::NoGradGuard no_grad;
      for (const auto strategy : {Strategy::FULL_SHARD, Strategy::NO_SHARD}) {
        const auto model = make_model({.sharding_strategy = strategy});
        const auto sum = [&] { return full_tensor(model->in->weight.detach()).sum().item<float>(); };
        FSDP::summon_full_params(*model, {}, [&] { model->in->weight.fill_(2); });
        expect_equal(sum(), 80.f);
        FSDP::summon_full_params(*model, {.writeback = false}, [&] { model->in->weight.fill_(3); });
        const bool is_whole = world_size == 1 || strategy == Strategy::NO_SHARD;
        expect_equal(sum(), is_whole ? 120.f : 80.f);
      }
    });
  }
}

TEST_CASE("rows 90, 116: an edit of one rank's rows between forward and backward is an error on every rank") {
  run_ranks(2, [](int) {
    const auto model = make_model();
    const auto edit = [&](int64_t row) {
      FSDP::summon_full_params(*model, {}, [&] {
        const at::NoGradGuard no_grad;
        TESSERA_EXPECT(row < 0 || model->in->weight[row].ne(7).any().item<bool>());
        if (row >= 0) {
          model->in->weight[row].fill_(7);
        }
      });
    };
    auto loss = weighted_loss(model(batch_of(0)));
    edit(0);  // a row of rank 0
    expect_throws<StateError>([&] { loss.backward(); }, "changed in place between forward and backward");
    model->zero_grad();
    loss = weighted_loss(model(batch_of(0)));
    edit(-1);  // a look
    loss.backward();
  });
}

TEST_CASE("rows 91, 116: summon_full_params for rank 0 alone; with write-back it is refused") {
  run_ranks(2, [](int rank) {
    const auto model = make_model();
    FSDP::summon_full_params(*model, {.writeback = false, .rank0_only = true}, [&] {
      for (const auto& parameter : model->parameters()) {
        expect_equal(is_dtensor(parameter), rank != 0);
      }
    });
    expect_throws<NotImplementedError>([&] { FSDP::summon_full_params(*model, {.rank0_only = true}, [] {}); },
                                       "rank0_only with writeback");
  });
}

TEST_CASE("rows 92, 116: summon_full_params on the CPU; refused where nothing is sharded") {
  run_ranks(2, [](int) {
    const auto model = make_model();
    FSDP::summon_full_params(*model, {.offload_to_cpu = true},
                             [&] { TESSERA_EXPECT(model->in->weight.device().is_cpu()); });
    const auto whole = make_model({.sharding_strategy = Strategy::NO_SHARD});
    expect_throws<NotImplementedError>([&] { FSDP::summon_full_params(*whole, {.offload_to_cpu = true}, [] {}); },
                                       "is not sharded (NO_SHARD)");
  });
}

TEST_CASE("what cannot be written back is named, and the model is as it was") {
  run_ranks(2, [](int) {
    const auto model = make_model();
    const auto as_half = [&] { model->in->to(at::kHalf); };
    expect_throws<ValueError>([&] { FSDP::summon_full_params(*model, {}, as_half); }, "'in.weight' is Half[8, 5] now");
    const auto shrink = [&] { model->in->bias.set_data(at::ones({2})); };
    expect_throws<ValueError>([&] { FSDP::summon_full_params(*model, {}, shrink); }, "'in.bias' is Float[2] now");
    FSDP::summon_full_params(*model, {.writeback = false}, as_half);
    const auto both = [&] {
      as_half();
      throw Error("from inside");
    };
    expect_throws<Error>([&] { FSDP::summon_full_params(*model, {}, both); }, "from inside");
    expect_gradients_of_average(model);
  });
}

TEST_CASE("rows 93, 116: summon_full_params with gradients in the full shape") {
  run_ranks(2, [](int) {
    const auto reference = reference_after_backward();
    const auto model = make_model();
    run_backward(model);
    FSDP::summon_full_params(*model, {.with_grads = true}, [&] {
      const auto expected = reference->named_parameters();
      for (const auto& item : model->named_parameters()) {
        expect_close(item.value().grad(), expected[item.key()].grad());
      }
      const at::NoGradGuard no_grad;
      model->in->bias.mutable_grad().fill_(5);
    });
    expect_equal(full_tensor(model->in->bias.grad()).sum().item<float>(), 40.f);
    FSDP::summon_full_params(*model, {}, [&] { TESSERA_EXPECT(!model->in->bias.grad().defined()); });
    TESSERA_EXPECT(is_dtensor(model->in->bias.grad()));
    expect_throws<NotImplementedError>(
        [&] { FSDP::summon_full_params(*model, {.offload_to_cpu = true, .with_grads = true}, [] {}); },
        "with_grads with offload_to_cpu");
  });
}

TEST_CASE("rows 94, 116: no scope inside of a scope, of forward or of backward, and no forward inside of one") {
  run_ranks(2, [](int) {
    const auto model = make_model();
    const auto summon = [&] { FSDP::summon_full_params(*model, {}, [] {}); };
    FSDP::summon_full_params(*model, {}, [&] {
      expect_throws<StateError>(summon, "is in the state SUMMON_FULL_PARAMS");
      expect_throws<StateError>([&] { model(batch_of(0)); }, "inside of summon_full_params");
      expect_throws<ValueError>([&] { model.apply([](torch::nn::Module&) {}); }, "apply");
      expect_throws<ValueError>([&] { model.clip_grad_norm_(1); }, "clip_grad_norm_");
      expect_throws<ValueError>([&] { model.no_sync([] {}); }, "allowed: IDLE");
    });
    int tries = 0;
    auto handle = find_hook_point(*model->blocks[0])->register_forward_pre_hook([&](HookPoint&, TensorRefs) {
      ++tries;
      expect_throws<StateError>(summon, "is in the state FORWARD_BACKWARD");
    });
    auto out = model(batch_of(get_rank()));
    handle.remove();
    out.register_hook([&](const at::Tensor&) {
      ++tries;
      expect_throws<StateError>(summon, "summon_full_params");
    });
    weighted_loss(out).backward();
    expect_equal(tries, 2);
    summon();
    TESSERA_EXPECT(model.training_state() == TrainingState::IDLE);
    expect_throws<Error>([&] { FSDP::summon_full_params(*model, {}, [] { throw Error("from inside"); }); },
                         "from inside");
    TESSERA_EXPECT(is_dtensor(model->in->weight) && model.training_state() == TrainingState::IDLE);
    run_backward(model);
  });
}

namespace {

/// Of every unit: what its module does, and whether its parameters are sharded.
void expect_states(const TowerModel& model, TrainingState training, ShardedState sharded) {
  const auto units = FSDP::fsdp_modules(*model);
  expect_equal(units.size(), 3u);
  for (const auto& unit : units) {
    expect_equal(to_string(unit.training_state()), to_string(training));
    expect_equal(to_string(fsdp(unit.module()).unit_state()), to_string(sharded));
  }
}

void expect_idle(const TowerModel& model) {
  expect_states(model, TrainingState::IDLE, ShardedState::Sharded);
}

}  // namespace

TEST_CASE(
    "row 113: what throws inside of summon_full_params or forward restores both states; of backward, the next one") {
  const int world_size = GENERATE(2, 4);
  run_ranks(world_size, [](int) {
    const auto model = make_model();
    expect_idle(model);
    const auto fail = [] { throw Error("from inside"); };
    for (const bool writeback : {true, false}) {
      expect_throws<Error>(
          [&] {
            FSDP::summon_full_params(*model, {.writeback = writeback}, [&] {
              for (const auto& unit : FSDP::fsdp_modules(*model)) {
                TESSERA_EXPECT(unit.training_state() == TrainingState::SUMMON_FULL_PARAMS);
              }
              fail();
            });
          },
          "from inside");
      expect_idle(model);
    }
    auto& inner = model->blocks[1];  // behind the first block and inside of the root
    {
      const ScopedHook hook(find_hook_point(*inner)->register_forward_pre_hook([&](HookPoint&, TensorRefs) {
        const auto unit = FSDP::fsdp_modules(*inner).at(0);
        TESSERA_EXPECT(unit.training_state() == TrainingState::FORWARD_BACKWARD);
        TESSERA_EXPECT(fsdp(*inner).unit_state() == ShardedState::Unsharded);
        fail();
      }));
      expect_throws<Error>([&] { model(batch_of(get_rank())); }, "from inside");
      expect_idle(model);
    }
    {
      const ScopedHook hook(find_hook_point(*inner)->register_forward_hook([&](HookPoint&, TensorRefs outputs) {
        outputs[0]->register_hook([&](const at::Tensor& grad) {
          fail();
          return grad;
        });
      }));
      expect_throws<Error>([&] { run_backward(model); }, "from inside");
      for (const auto& unit : FSDP::fsdp_modules(*model)) {
        TESSERA_EXPECT(unit.training_state() == TrainingState::IDLE);
      }
    }
    model->zero_grad();
    expect_gradients_of_average(model);
    expect_idle(model);
  });
}

TEST_CASE("rows 97, 116: assert_state names the state and those that are allowed") {
  run_ranks(2, [](int) {
    const auto model = make_model();
    model.assert_state({TrainingState::IDLE});
    expect_throws<ValueError>(
        [&] {
          model.assert_state({TrainingState::FORWARD_BACKWARD, TrainingState::SUMMON_FULL_PARAMS});
        },
        "in the state IDLE, allowed: FORWARD_BACKWARD, SUMMON_FULL_PARAMS");
  });
}

TEST_CASE("row 80: apply sees full parameters, its edits stay, and the model may become part of a larger one") {
  run_ranks(2, [](int) {
    auto tower = make_tower();
    TowerModel model(tower, {.auto_wrap_policy = module_wrap_policy<BlockImpl>()});
    int calls = 0;
    model.apply([&](torch::nn::Module& module) {
      ++calls;
      const at::NoGradGuard no_grad;
      for (auto& parameter : module.parameters(/*recurse=*/false)) {
        TESSERA_EXPECT(!is_dtensor(parameter));
        parameter.fill_(0.5);
      }
    });
    expect_equal(calls, 10);
    expect_equal(full_tensor(tower->blocks[0]->down->weight.detach()).sum().item<float>(), 24.f);
    tessera::nn::Sequential larger;
    larger->push_back(tower);
    const FullyShardedDataParallel outer(larger);
    weighted_loss(outer(batch_of(get_rank()))).backward();
    TESSERA_EXPECT(outer.check_is_root() && !model.check_is_root());
  });
}

TEST_CASE("summon_full_params shows the parameters of units that fully_shard and replicate made, too") {
  const bool replicates = GENERATE(false, true);
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [&](int) {
      auto plain = make_tower(), tower = make_tower();
      for (auto& block : tower->blocks) {
        replicates ? replicate(block) : fully_shard(block);
      }
      replicates ? replicate(tower) : fully_shard(tower);
      const auto forward = [&] { return tower(batch_of(get_rank())); };
      const auto summon = [&] { FSDP::summon_full_params(*tower, {}, [] {}); };
      forward();  // which leaves the root's parameters unsharded
      FSDP::summon_full_params(*tower, {.writeback = false}, [&] {
        expect_values(*tower, *plain);
        expect_throws<StateError>(forward, "inside of summon_full_params");
        expect_throws<StateError>(summon, "is in the state SUMMON_FULL_PARAMS");
      });
      FSDP::summon_full_params(*tower, {.recurse = false}, [&] {
        TESSERA_EXPECT(!is_dtensor(tower->in->weight) && is_dtensor(tower->blocks[0]->up->weight));
      });
      expect_throws<Error>([&] { FSDP::summon_full_params(*tower, {}, [] { throw Error("from inside"); }); },
                           "from inside");
      const at::NoGradGuard no_grad;
      FSDP::summon_full_params(*tower, {}, [&] { tower->blocks[1]->up->weight.mul_(2); });
      plain->blocks[1]->up->weight.mul_(2);
      summon();
      expect_bit_equal(full_tensor(tower->blocks[1]->up->weight), plain->blocks[1]->up->weight);
      TESSERA_EXPECT(is_dtensor(tower->in->weight));
      expect_close(forward(), plain(batch_of(get_rank())));
    });
  }
}

TEST_CASE("summon_full_params of units of fully_shard inside of wrapped ones") {
  run_ranks(2, [](int) {
    const auto plain = make_tower();
    auto tower = make_tower();
    fully_shard(tower->blocks[0]);
    const FullyShardedDataParallel model(tower);
    FSDP::summon_full_params(*model, {}, [&] { expect_values(*tower, *plain); });
    expect_throws<StateError>(
        [&] { FSDP::summon_full_params(*model, {}, [&] { tower->blocks[0](make_batch(1, 2, 8)); }); },
        "inside of summon_full_params");
    TESSERA_EXPECT(is_dtensor(tower->in->weight) && is_dtensor(tower->blocks[0]->up->weight));
  });
}

}  // namespace tessera::testing
