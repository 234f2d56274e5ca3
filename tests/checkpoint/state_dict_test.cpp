// State dicts: whole, on the CPU, from rank 0; and what does not fit.

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "checkpoint/checkpoint.h"
#include "comm/collectives.h"
#include "dtensor/dtensor.h"
#include "fully_shard/to_empty.h"
#include "nn/hooks/hook_point.h"
#include "nn/meta_device.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "testing/tensor_matchers.h"
#include "tests/checkpoint/layouts.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

at::Tensor tensor_at(const dcp::StateDict& state, const std::string& key) {
  return std::get<at::Tensor>(state.at(key));
}

void expect_same(const dcp::StateDict& actual, const dcp::StateDict& expected) {
  expect_equal(actual.size(), expected.size());
  for (const auto& [key, value] : expected) {
    if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
      expect_bit_equal(tensor_at(actual, key), is_dtensor(*tensor) ? full_tensor(*tensor) : *tensor);
    } else {
      TESSERA_EXPECT(actual.at(key).index() == value.index());
    }
  }
}

/// One step of an optimizer of this kind, its state set in another one, then both step again and must be equal.
template <class Optimizer, class Options>
void check_optimizer(const Options& options) {
  Tower model, other;
  fill_parameters(*model, 1);
  fill_parameters(*other, 1);
  Optimizer optimizer(model->parameters(), options), second(other->parameters(), Options(0.5));
  const auto train = [](Tower& tower, Optimizer& with, int64_t step) {
    with.zero_grad();
    weighted_loss(tower(make_batch(static_cast<uint64_t>(step), 6, 5))).backward();
    with.step();
  };
  train(model, optimizer, 0);
  train(model, optimizer, 1);
  dcp::set_model_state_dict(other, dcp::get_model_state_dict(model));
  dcp::set_optimizer_state_dict(other, second, clones(dcp::get_optimizer_state_dict(model, optimizer)));
  train(model, optimizer, 2);
  train(other, second, 2);
  expect_same(dcp::get_model_state_dict(other), dcp::get_model_state_dict(model));
  expect_same(dcp::get_optimizer_state_dict(other, second), dcp::get_optimizer_state_dict(model, optimizer));
}

}  // namespace

TEST_CASE("names and values of a plain model and its optimizer") {
  TestTrainer trainer(test_layout("1"), 1);
  CHECK(dcp::get_optimizer_state_dict(trainer.model, trainer.optimizer).count("state.in.weight.exp_avg") == 0);
  trainer.train(0);
  const auto state = trainer.state();
  CHECK(state.model.size() == 18);
  CHECK(tensor_at(state.model, "block1.up.weight").is_same(trainer.model->blocks[1]->up->weight));
  CHECK(tensor_at(state.optimizer, "state.in.weight.exp_avg").sizes() == at::IntArrayRef{17, 5});
  CHECK(std::get<int64_t>(state.optimizer.at("state.in.weight.step")) == 1);
  CHECK(std::get<double>(state.optimizer.at("param_groups.norm.bias.lr")) == 0.01);
  CHECK(std::get<double>(state.optimizer.at("param_groups.norm.bias.beta2")) == 0.999);
}

TEST_CASE("each known optimizer goes on as if nothing had happened") {
  check_optimizer<torch::optim::Adam>(torch::optim::AdamOptions(0.01).amsgrad(true));
  check_optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01).betas({0.8, 0.9}));
  check_optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.01).momentum(0.9).dampening(0.1));
  check_optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.01));
  check_optimizer<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.01).momentum(0.9).centered(true));
  check_optimizer<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.01));
  Tower model;
  torch::optim::LBFGS lbfgs(model->parameters());
  CHECK_THROWS_AS(dcp::get_optimizer_state_dict(model, lbfgs), NotImplementedError);
}

TEST_CASE("a whole state dict that rank 0 alone would get, of a mesh without it") {
  run_ranks(3, [](int rank) {
    if (rank == 0) {
      return;
    }
    torch::nn::Linear linear(3, 5);
    linear->weight = distribute_tensor(linear->weight, init_device_mesh(at::kCPU, {2}, {}, {1, 2}), {Shard(0)});
    linear->register_parameter("shard", linear->weight);
    expect_throws<ValueError>(
        [&] { dcp::get_model_state_dict(*linear, {.full_state_dict = true, .cpu_offload = true}); },
        "rank 0 alone would have 'shard'");
    TESSERA_EXPECT(dcp::get_model_state_dict(*linear, {.full_state_dict = true}).contains("shard"));
  });
}

TEST_CASE("whole state dicts, and back from rank 0 alone or from every rank") {
  for (const std::string name : {"2", "3", "2x2 HSDP", "2x2 FSDP+TP"}) {
    run_ranks(test_layout(name).ranks, [&](int rank) {
      TestTrainer trainer(test_layout(name), 1), other(test_layout(name), 2);
      trainer.train(0);
      const dcp::StateDictOptions offloaded{.full_state_dict = true, .cpu_offload = true};
      const auto model = dcp::get_model_state_dict(trainer.model, offloaded);
      const auto optimizer = dcp::get_optimizer_state_dict(trainer.model, trainer.optimizer, offloaded);
      TESSERA_EXPECT(model.empty() == (rank > 0) && optimizer.empty() == (rank > 0));
      const dcp::StateDictOptions from_rank0{.broadcast_from_rank0 = true};
      dcp::set_model_state_dict(other.model, model, from_rank0);
      dcp::set_optimizer_state_dict(other.model, other.optimizer, optimizer, from_rank0);
      trainer.train(1);
      other.train(1);
      const dcp::StateDictOptions full{.full_state_dict = true};
      expect_same(dcp::get_model_state_dict(other.model, full), dcp::get_model_state_dict(trainer.model, full));
      expect_same(dcp::get_optimizer_state_dict(other.model, other.optimizer, full),
                  dcp::get_optimizer_state_dict(trainer.model, trainer.optimizer, full));

      TestTrainer third(test_layout(name), 3);
      dcp::set_model_state_dict(third.model, dcp::get_model_state_dict(trainer.model, full), full);
      dcp::set_optimizer_state_dict(third.model, third.optimizer,
                                    dcp::get_optimizer_state_dict(trainer.model, trainer.optimizer, full), full);
      trainer.train(2);
      third.train(2);
      expect_same(dcp::get_model_state_dict(third.model, full), dcp::get_model_state_dict(trainer.model, full));
    });
  }
}

TEST_CASE("an optimizer's own state from rank 0: handles are sent too") {
  for (const bool full : {false, true}) {
    run_ranks(2, [&](int rank) {
      Tower model;
      fill_parameters(*model, 1);
      torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
      weighted_loss(model(make_batch(static_cast<uint64_t>(rank), 6, 5))).backward();
      optimizer.step();
      const auto state = dcp::get_optimizer_state_dict(model, optimizer, {.full_state_dict = full});
      const auto momentum = tensor_at(state, "state.in.weight.momentum_buffer");
      // Plain parameters: the state has the optimizer's own tensors (if full, copies), which differ between the ranks.
      const auto expected = momentum.clone();
      broadcast(expected, 0, default_group());
      TESSERA_EXPECT(rank == 0 || !momentum.equal(expected));
      dcp::set_optimizer_state_dict(model, optimizer, state, {.full_state_dict = full, .broadcast_from_rank0 = true});
      expect_bit_equal(tensor_at(dcp::get_optimizer_state_dict(model, optimizer), "state.in.weight.momentum_buffer"),
                       expected);
    });
  }
}

TEST_CASE("parameters that are unsharded after forward are resharded first") {
  run_ranks(2, [&](int) {
    TestTrainer trainer(test_layout("2"), 1);
    trainer.model(make_batch(0, 3, 5));
    TESSERA_EXPECT(!is_dtensor(trainer.model->in->weight));
    TESSERA_EXPECT(is_dtensor(tensor_at(dcp::get_model_state_dict(trainer.model), "in.weight")));
  });
}

TEST_CASE("a part of a unit that is unsharded is saved and loaded as its shards") {
  const int world_size = GENERATE(1, 2, 3);
  run_ranks(world_size, [](int) {
    Tower source, before, tower;
    fill_parameters(*source, 1);
    fill_parameters(*before, 2);
    fill_parameters(*tower, 2);
    shard_tower(tower, {.mp_policy = {.param_dtype = at::kBFloat16}});
    const dcp::StateDictOptions full{.full_state_dict = true};
    const auto unshard = [&] {
      tower(make_batch(0, 3, 5));  // and nothing frees the outermost unit
      TESSERA_EXPECT(tower->out->weight.scalar_type() == at::kBFloat16);
    };
    unshard();
    expect_same(dcp::get_model_state_dict(*tower->out, full), dcp::get_model_state_dict(*before->out));
    unshard();
    dcp::set_model_state_dict(*tower->out, dcp::get_model_state_dict(*source->out, full), full);
    unshard();
    expect_same(dcp::get_model_state_dict(*tower->out, full), dcp::get_model_state_dict(*source->out, full));
    expect_throws<StateError>(
        [&] {
          const ScopedHook hook(hook_point(*tower->out, "test").register_forward_hook([&](HookPoint&, TensorRefs) {
            dcp::get_model_state_dict(*tower->norm);
          }));
          tower(make_batch(0, 3, 5));
        },
        "while the unit 'root' computes with them");
  });
}

TEST_CASE(
    "handles that were taken before a forward are those of the shards, and the next forward sees what they load") {
  const TempFolder folder;
  run_ranks(2, [&](int) {
    TestTrainer saved(test_layout("2"), 1);
    dcp::save(folder.path("saved"), {.model = dcp::get_model_state_dict(saved.model)});
    const auto x = make_batch(0, 3, 5);
    const auto expected = saved.model(x).detach();
    TestTrainer trainer(test_layout("2"), 2);
    dcp::State state{.model = dcp::get_model_state_dict(trainer.model)};
    trainer.model(x);
    TESSERA_EXPECT(!is_dtensor(trainer.model->in->weight));
    dcp::load(folder.path("saved"), state);
    expect_bit_equal(trainer.model(x).detach(), expected);
  });
}

TEST_CASE("an optimizer's state is set after a forward, too") {
  run_ranks(2, [&](int) {
    TestTrainer trained(test_layout("2"), 1);
    trained.train(0);
    const auto whole = dcp::get_optimizer_state_dict(trained.model, trained.optimizer, {.full_state_dict = true});
    TestTrainer trainer(test_layout("2"), 1);
    trainer.model(make_batch(0, 3, 5));
    TESSERA_EXPECT(!is_dtensor(trainer.model->in->weight));
    dcp::set_optimizer_state_dict(trainer.model, trainer.optimizer, whole, {.full_state_dict = true});
    expect_same(dcp::get_optimizer_state_dict(trainer.model, trainer.optimizer, {.full_state_dict = true}), whole);
    trainer.train(1);
  });
}

TEST_CASE("a whole state dict is a copy under every layout, and brings all back") {
  for (const auto& layout : test_layouts()) {
    run_ranks(layout.ranks, [&](int) {
      TestTrainer trainer(layout, 1);
      trainer.model->register_buffer("seen", at::ones({2}));
      trainer.train(0);
      const dcp::StateDictOptions full{.full_state_dict = true};
      const auto model = dcp::get_model_state_dict(trainer.model, full);
      const auto optimizer = dcp::get_optimizer_state_dict(trainer.model, trainer.optimizer, full);
      const auto expected = clones(model), expected_optimizer = clones(optimizer);
      trainer.train(1);
      trainer.model->named_buffers()["seen"].add_(1);
      dcp::set_model_state_dict(trainer.model, model, full);
      dcp::set_optimizer_state_dict(trainer.model, trainer.optimizer, optimizer, full);
      expect_same(dcp::get_model_state_dict(trainer.model, full), expected);
      expect_same(dcp::get_optimizer_state_dict(trainer.model, trainer.optimizer, full), expected_optimizer);
    });
  }
}

TEST_CASE("frozen parameters can be left out, and what does not fit is refused on every rank") {
  run_ranks(2, [&](int rank) {
    TestTrainer trainer(test_layout("2"), 1);
    trainer.train(0);
    auto state = dcp::get_model_state_dict(trainer.model);
    const auto before = dcp::get_model_state_dict(trainer.model, {.full_state_dict = true});
    auto less = state;
    less.erase("in.weight");
    less["other"] = at::ones({1});
    expect_throws<KeyError>([&] { dcp::set_model_state_dict(trainer.model, less); },
                            "missing: (in.weight); unexpected: (other)");
    auto plain = state;
    plain["in.bias"] = rank == 1 ? dcp::StateValue(at::ones({17})) : plain["in.bias"];
    expect_throws<ValueError>([&] { dcp::set_model_state_dict(trainer.model, plain); },
                              "'in.bias' is a plain tensor, the model's a DTensor");
    auto wrong = before;
    wrong["in.bias"] = at::ones({16});
    expect_throws<ValueError>([&] { dcp::set_model_state_dict(trainer.model, wrong, {.full_state_dict = true}); },
                              "'in.bias' has sizes [16], the model's has [17]");
    wrong["in.bias"] = at::ones({17}, at::kLong);
    for (const bool from_rank0 : {false, true}) {
      const dcp::StateDictOptions options{.full_state_dict = true, .broadcast_from_rank0 = from_rank0};
      expect_throws<ValueError>([&] { dcp::set_model_state_dict(trainer.model, wrong, options); },
                                "'in.bias' is Long, the model's Float; only floating dtypes are cast");
    }
    expect_same(dcp::get_model_state_dict(trainer.model, {.full_state_dict = true}), before);
    trainer.model->in->weight.set_requires_grad(false);
    expect_equal(dcp::get_model_state_dict(trainer.model, {.ignore_frozen_params = true}).size(), state.size() - 1);

    auto optimizer = dcp::get_optimizer_state_dict(trainer.model, trainer.optimizer);
    optimizer["state.none.exp_avg"] = at::ones({1});
    expect_throws<KeyError>([&] { dcp::set_optimizer_state_dict(trainer.model, trainer.optimizer, optimizer); },
                            "'state.none.exp_avg' belongs to no parameter");
    optimizer.erase("state.none.exp_avg");
    optimizer["param_groups.in.bias.lr"] = 0.5;
    expect_throws<ValueError>([&] { dcp::set_optimizer_state_dict(trainer.model, trainer.optimizer, optimizer); },
                              "give parameters that need other options a group of their own");
  });
}

TEST_CASE("what has no memory, or is sparse, is refused on every rank, and nothing is set") {
  run_ranks(2, [](int rank) {
    Tower model;
    fill_parameters(*model, 1);
    test_layout("2").shard(model);
    const dcp::StateDictOptions whole{.full_state_dict = true};
    const auto before = dcp::get_model_state_dict(model, whole);
    // Rank 0's tensor is what every rank is sent; without that each has its own, of which one rank's alone is wrong.
    const auto refused = [&](int faulty_rank, const dcp::StateDictOptions& options, auto wrong) {
      auto given = clones(before);
      given["in.bias"] = at::full({17}, 5.0);
      given["out.bias"] = rank == faulty_rank ? wrong(tensor_at(given, "out.bias")) : tensor_at(given, "out.bias");
      expect_throws<ValueError>([&] { dcp::set_model_state_dict(model, given, options); },
                                "the given 'out.bias' lies on");
      expect_same(dcp::get_model_state_dict(model, whole), before);
    };
    const auto meta = [](const at::Tensor& tensor) { return tensor.to(at::kMeta); };
    const auto sparse = [](const at::Tensor& tensor) { return tensor.to_sparse(); };
    refused(1, whole, meta);
    refused(1, whole, sparse);
    refused(0, {.broadcast_from_rank0 = true}, meta);
    refused(0, {.broadcast_from_rank0 = true}, sparse);

    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
    const auto momentum = rank == 1 ? at::ones({17, 5}, at::kMeta) : at::ones({17, 5});
    expect_throws<ValueError>(
        [&] {
          dcp::set_optimizer_state_dict(model, optimizer, {{"state.in.weight.momentum_buffer", momentum}}, whole);
        },
        "the given 'state.in.weight.momentum_buffer' lies on meta");
    TESSERA_EXPECT(optimizer.state().empty());
  });
}

TEST_CASE("a plain model is set by one rank alone, and so are its faults; not where rank 0 sends") {
  run_ranks(2, [](int rank) {
    TestTrainer trainer(test_layout("2"), 1);
    trainer.train(0);
    const dcp::StateDictOptions on_rank0{.full_state_dict = true, .cpu_offload = true};
    const auto state = dcp::get_model_state_dict(trainer.model, on_rank0);
    const auto of_optimizer = dcp::get_optimizer_state_dict(trainer.model, trainer.optimizer, on_rank0);
    Tower plain;
    torch::optim::AdamW optimizer(plain->parameters(), 0.01);
    if (rank == 0) {
      dcp::set_model_state_dict(plain, state);
      expect_same(dcp::get_model_state_dict(plain), state);
      dcp::set_optimizer_state_dict(plain, optimizer, of_optimizer);
      expect_same(dcp::get_optimizer_state_dict(plain, optimizer), of_optimizer);
      dcp::set_model_state_dict(plain, state, {.full_state_dict = true});
      expect_throws<KeyError>([&] { dcp::set_model_state_dict(plain, {}); }, "missing: (");
      expect_throws<KeyError>([&] { dcp::set_optimizer_state_dict(plain, optimizer, {}); }, "the dict is empty");
    }
    dcp::set_model_state_dict(plain, state, {.full_state_dict = true, .broadcast_from_rank0 = true});
    expect_same(dcp::get_model_state_dict(plain), dcp::get_model_state_dict(trainer.model, {.full_state_dict = true}));
  });
}

TEST_CASE("a model on the meta device must get memory before its state is set") {
  run_ranks(2, [](int) {
    for (const auto* layout : {"1", "2"}) {
      Tower source;
      fill_parameters(*source, 1);
      const auto state = clones(dcp::get_model_state_dict(source));
      const auto make = [&] {
        const MetaDeviceGuard on_meta;
        return Tower();
      };
      Tower model = make();
      torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
      if (test_layout(layout).shard) {
        test_layout(layout).shard(model);
      }
      for (const bool from_rank0 : {false, true}) {
        const dcp::StateDictOptions options{.full_state_dict = true, .broadcast_from_rank0 = from_rank0};
        expect_throws<ValueError>([&] { dcp::set_model_state_dict(model, state, options); },
                                  "is on the meta device; call to_empty() before");
        expect_throws<ValueError>(
            [&] {
              dcp::set_optimizer_state_dict(model, optimizer, {{"state.in.weight.momentum_buffer", at::ones({17, 5})}},
                                            options);
            },
            "is on the meta device; call to_empty() before");
      }
      to_empty(model, at::kCPU);
      const dcp::StateDictOptions full{.full_state_dict = true};
      dcp::set_model_state_dict(model, state, full);
      expect_same(dcp::get_model_state_dict(model, full), state);
    }
  });
}

}  // namespace tessera::testing
