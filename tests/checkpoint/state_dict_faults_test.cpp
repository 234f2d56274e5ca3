// State dicts that one rank alone gets or sets at a wrong time, which is an error of all; and an optimizer whose state
// came by another way.

#include <ATen/ops/ones.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <functional>
#include <map>

#include "checkpoint/checkpoint.h"
#include "comm/process_group.h"
#include "dtensor/dtensor.h"
#include "fsdp1/fsdp.h"
#include "nn/hooks/hook_point.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "testing/tensor_matchers.h"
#include "tests/checkpoint/layouts.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr dcp::StateDictOptions kFromFirst{.broadcast_from_rank0 = true};

/// Copies of this rank's part of each tensor.
std::map<std::string, at::Tensor> own_segments(const dcp::StateDict& state) {
  std::map<std::string, at::Tensor> parts;
  for (const auto& [key, value] : state) {
    if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
      parts[key] = (is_dtensor(*tensor) ? to_local(*tensor) : *tensor).detach().clone();
    }
  }
  return parts;
}

void expect_same_parts(const std::map<std::string, at::Tensor>& actual,
                       const std::map<std::string, at::Tensor>& expected) {
  expect_equal(actual.size(), expected.size());
  for (const auto& [key, tensor] : expected) {
    expect_bit_equal(actual.at(key), tensor);
  }
}

/// Of all ranks, also of the one whose fault it is.
void expect_fault_of_first(const std::function<void()>& call) {
  std::string message;
  const auto noted = [&] {
    try {
      call();
    } catch (const StateError& error) {
      message = error.what();
      throw;
    }
  };
  expect_throws<StateError>(noted, "while the unit 'root' computes with them");
  TESSERA_EXPECT(get_rank() == 0 || message.find("rank 0") != std::string::npos);
}

/// Rank 0 calls it inside of its forward, the others after theirs: all throw, and nothing is set.
void check_call(TestTrainer& trainer, const std::function<void()>& call) {
  const auto handles = trainer.state();
  const auto model = own_segments(handles.model), optimizer = own_segments(handles.optimizer);
  const auto x = make_batch(0, 3, 5);
  if (get_rank() > 0) {
    trainer.model(x);
    expect_fault_of_first(call);
  } else {
    const ScopedHook hook(
        hook_point(*trainer.model->blocks.back(), "test").register_forward_hook([&](HookPoint&, TensorRefs) {
          call();
        }));
    expect_fault_of_first([&] { trainer.model(x); });
  }
  expect_same_parts(own_segments(handles.model), model);
  expect_same_parts(own_segments(handles.optimizer), optimizer);
}

/// Makes the collective call, from the state of another model on the same layout.
using MakeCall = std::function<std::function<void()>(TestTrainer& trainer, TestTrainer& other)>;

void check_calls(const std::vector<MakeCall>& calls) {
  for (const std::string name : {"2", "2x2 HSDP"}) {
    for (const auto& make_call : calls) {
      const auto check = [&](int) {
        TestTrainer trainer(test_layout(name), 1), other(test_layout(name), 2);
        trainer.train(0);
        other.train(1);
        check_call(trainer, make_call(trainer, other));
      };
      run_ranks(test_layout(name).ranks, check, {.timeout = std::chrono::seconds(20)});
    }
  }
}

}  // namespace

TEST_CASE("a model's state that one rank sets inside of its forward is an error on all") {
  check_calls({
      [](auto& trainer, auto& other) {
        const auto state = dcp::get_model_state_dict(other.model, kFull);
        return [&, state] { dcp::set_model_state_dict(trainer.model, state, kFull); };
      },
      [](auto& trainer, auto& other) {
        const auto state = dcp::get_model_state_dict(other.model);
        return [&, state] { dcp::set_model_state_dict(trainer.model, state); };
      },
      [](auto& trainer, auto& other) {
        const auto state = dcp::get_model_state_dict(other.model, kFull);
        return [&, state] { dcp::set_model_state_dict(trainer.model, state, kFromFirst); };
      },
      // A part of the outermost unit, whose parameters are plain tensors inside of the forward.
      [](auto& trainer, auto& other) {
        const auto state = dcp::get_model_state_dict(*other.model->norm, kFull);
        return [&, state] { dcp::set_model_state_dict(*trainer.model->norm, state, kFull); };
      },
  });
}

TEST_CASE("an optimizer's state that one rank sets or asks for inside of its forward is an error on all") {
  const TempFolder folder;
  check_calls({
      [](auto& trainer, auto& other) {
        const auto state = dcp::get_optimizer_state_dict(other.model, other.optimizer, kFull);
        return [&, state] { dcp::set_optimizer_state_dict(trainer.model, trainer.optimizer, state, kFull); };
      },
      [](auto& trainer, auto& other) {
        const auto state = dcp::get_optimizer_state_dict(other.model, other.optimizer);
        return [&, state] { dcp::set_optimizer_state_dict(trainer.model, trainer.optimizer, state); };
      },
      [](auto& trainer, auto& other) {
        const auto state = dcp::get_optimizer_state_dict(other.model, other.optimizer, kFull);
        return [&, state] { dcp::set_optimizer_state_dict(trainer.model, trainer.optimizer, state, kFromFirst); };
      },
      [&folder](auto& trainer, auto& other) {
        const auto path = folder.path(std::to_string(get_world_size()));
        other.save(path, 1);
        return [&trainer, path] { dcp::optimizer_state_to_load(path, trainer.model, trainer.optimizer); };
      },
  });
}

TEST_CASE("whole state dicts that one rank gets inside of its forward are an error on all") {
  check_calls({
      [](auto& trainer, auto&) { return [&] { dcp::get_model_state_dict(trainer.model, kFull); }; },
      [](auto& trainer, auto&) { return [&] { dcp::get_model_state_dict(*trainer.model->norm, kFull); }; },
      [](auto& trainer, auto&) {
        return [&] { dcp::get_optimizer_state_dict(trainer.model, trainer.optimizer, kFull); };
      },
  });
}

TEST_CASE("the rank that summon_full_params shows whole parameters gets them alone") {
  run_ranks(2, [](int rank) {
    TestTrainer trainer(test_layout("2"), 1);
    const auto expected = own_segments(dcp::get_model_state_dict(trainer.model, kFull));
    FSDP::summon_full_params(*trainer.model, {.writeback = false, .rank0_only = true}, [&] {
      if (rank == 0) {
        expect_same_parts(own_segments(dcp::get_model_state_dict(trainer.model, kFull)), expected);
      }
    });
  });
}

TEST_CASE("an optimizer whose state is plain beside sharded parameters says how to set it, and that works") {
  run_ranks(2, [](int) {
    for (const double weight_decay : {0.0, 0.1}) {
      const auto options = torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(weight_decay);
      Tower model, plain;
      fill_parameters(*model, 1);
      torch::optim::SGD optimizer(model->parameters(), options), plain_optimizer(plain->parameters(), options);
      shard_tower(model);
      // As torch::load.
      const auto give_plain_state = [](Tower& tower, torch::optim::SGD& to) {
        for (const auto& param : tower->parameters()) {
          auto state = std::make_unique<torch::optim::SGDParamState>();
          state->momentum_buffer(at::ones(param.sizes()));
          to.state()[param.unsafeGetTensorImpl()] = std::move(state);
        }
      };
      give_plain_state(model, optimizer);
      give_plain_state(plain, plain_optimizer);
      weighted_loss(model(make_batch(1, 6, 5))).backward();
      const auto* remedy = "dcp::set_optimizer_state_dict(net, optimizer, dcp::get_optimizer_state_dict(plain, ";
      if (weight_decay == 0) {
        expect_throws<StateError>([&] { optimizer.step(); }, remedy);  // the gradient itself meets the state
      } else {
        expect_throws<ValueError>([&] { optimizer.step(); }, remedy);
      }
      const auto state = dcp::get_optimizer_state_dict(plain, plain_optimizer);
      dcp::set_optimizer_state_dict(model, optimizer, state, kFull);
      expect_same_parts(own_segments(dcp::get_optimizer_state_dict(model, optimizer, kFull)), own_segments(state));
      optimizer.step();
    }
  });
}

}  // namespace tessera::testing
