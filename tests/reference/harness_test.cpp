// The tools that the tests of models stand on: helpers for states, groups, subtests, ranks, parity.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <torch/optim/sgd.h>

#include <atomic>
#include <chrono>

#include "comm/collectives.h"
#include "dtensor/dtensor.h"
#include "dtensor/factories.h"
#include "fully_shard/composable_apis.h"
#include "parallel/distribute_module.h"
#include "testing/expect.h"
#include "testing/fsdp_models/dummy_process_group.h"
#include "testing/fsdp_models/execution_modes.h"
#include "testing/fsdp_models/module_states.h"
#include "testing/fsdp_models/nested_wrapped_models.h"
#include "testing/fsdp_models/run_subtests.h"
#include "testing/fsdp_models/transformer_with_shared_params.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/reference/dp_mesh.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

std::shared_ptr<FSDPTestModel> nested(const DeviceMesh& mesh, bool sharded) {
  InitOptions options{.mesh = mesh, .deterministic = true};
  if (sharded) {
    options.fsdp_init_mode = FSDPInitMode::RECURSIVE;
  }
  auto model = nested_wrapped_model().init(options);
  if (sharded) {
    wrap_unit(*model, options);
  }
  return model;
}

void forward_and_backward(FSDPTestModel& model, const at::Tensor& input) {
  model.run_backward(model.get_loss({input}, model.forward({input})));
}

}  // namespace

TEST_CASE("row 1: the world has as many ranks as the test says") {
  for (const int world_size : {2, 4}) {
    std::atomic<int> ranks{0};
    run_ranks(world_size, [&](int) {
      expect_equal(get_world_size(), world_size);
      TESSERA_EXPECT(dp_mesh().size() == world_size);
      ++ranks;
    });
    CHECK(ranks == world_size);
  }
  CHECK_THROWS_AS(run_ranks(0, [](int) {}), ValueError);
}

TEST_CASE("row 4: assert_module_states finds a changed value, and a parameter too many, on every rank") {
  run_ranks(2, [](int rank) {
    const auto mesh = dp_mesh();
    const auto model = nested(mesh, /*sharded=*/false);
    assert_module_states(*model, mesh);
    int64_t calls = 0;
    assert_module_states(*model, mesh, [&](const at::Tensor&, const at::Tensor&) { ++calls; });
    expect_equal(calls, 10);
    {
      const at::NoGradGuard no_grad;
      model->parameters()[7].add_(rank * 0.5);
    }
    expect_throws<ExpectationError>([&] { assert_module_states(*model, mesh); }, "differ");
    torch::nn::Module other;
    other.register_parameter("a", at::ones({2}));
    if (rank == 1) {
      other.register_parameter("b", at::ones({2}));
    }
    expect_throws<ExpectationError>([&] { assert_module_states(other, mesh); }, "rank 1 has");
  });
}

TEST_CASE("row 5: zero_model clears every shard; buffers only if asked") {
  run_ranks(2, [](int) {
    const auto model = transformer_with_shared_params().init(
        {.mesh = dp_mesh(), .fsdp_init_mode = FSDPInitMode::RECURSIVE, .deterministic = true});
    zero_model(*model);
    for (const auto& parameter : model->parameters()) {
      TESSERA_EXPECT(is_dtensor(parameter));
      expect_equal(to_local(parameter.detach()).abs().sum().item<float>(), 0.f);
    }
    expect_equal(model->named_buffers()["vocab_bias"].sum().item<float>(), 16.f);
    const auto full = full_tensor(model->parameters()[0].detach());
    expect_equal(full.abs().sum().item<float>(), 0.f);
    zero_model(*model, {.zero_buffers = true});
    expect_equal(model->named_buffers()["vocab_bias"].sum().item<float>(), 0.f);
  });
}

TEST_CASE("row 6: get_state_dict: entries in float16 and on the device; integers stay; the model is not changed") {
  run_ranks(2, [](int) {
    for (const auto mode : {FSDPInitMode::NO_FSDP, FSDPInitMode::RECURSIVE}) {
      const auto model =
          transformer_with_shared_params().init({.mesh = dp_mesh(), .fsdp_init_mode = mode, .deterministic = true});
      const auto state = get_state_dict(*model, {.cpu_offload = true, .half = true});
      expect_equal(state.size(), 69u + 2 + 3);  // batch norm has three buffers
      for (const auto& item : state) {
        TESSERA_EXPECT(item.value().device().is_cpu());
        const bool is_integer = item.key() == "long_buffer" || item.key() == "bn.num_batches_tracked";
        TESSERA_EXPECT(item.value().scalar_type() == (is_integer ? at::kLong : at::kHalf));
      }
      TESSERA_EXPECT(model->parameters()[0].scalar_type() == at::kFloat);
      TESSERA_EXPECT(get_state_dict(*model)["embed_tokens.weight"].scalar_type() == at::kFloat);
    }
  });
}

TEST_CASE("row 7: subtest_name, and helpers that do nothing where their flag is off") {
  const std::map<std::string, std::string> mapping{{"true", "offload"}, {"false", "no_offload"}, {"FULL", "full"}};
  CHECK(subtest_name(mapping, {"true", "FULL"}) == "offload_full");
  CHECK(subtest_name(mapping, {"false", std::nullopt}) == "no_offload_none");
  CHECK(subtest_name(mapping, {}) == "");
  CHECK_THROWS_AS(subtest_name(mapping, {"HYBRID"}), KeyError);
  run_ranks(1, [](int) {
    tessera::nn::Linear module(2, 2);
    const auto* weight = module->weight.unsafeGetTensorImpl();
    TESSERA_EXPECT(&move_to_device(*module, false) == module.get());
    TESSERA_EXPECT(&maybe_wrap_fsdp(*module, false) == module.get());
    expect_equal(composable_apis(*module).size(), 0u);
    TESSERA_EXPECT(&move_to_device(*module, true, at::kCPU) == module.get());
    TESSERA_EXPECT(&maybe_wrap_fsdp(*module, true, {.mesh = dp_mesh()}) == module.get());
    expect_equal(composable_apis(*module), std::vector<std::string>{"fully_shard"});
    TESSERA_EXPECT(module->weight.unsafeGetTensorImpl() == weight);
  });
}

TEST_CASE("row 8: broadcast_state_dict: the other ranks start empty and end equal") {
  run_ranks(4, [](int rank) {
    const auto mesh = dp_mesh();
    const auto model = transformer_with_shared_params().init({.mesh = mesh, .deterministic = true});
    const auto own = get_state_dict(*model);
    const auto received = broadcast_state_dict(rank == 0 ? own : StateDict(), mesh);
    expect_equal(received.keys(), own.keys());
    for (const auto& item : own) {
      expect_bit_equal(received[item.key()], item.value());
    }
    StateDict sharded;
    sharded.insert("w", ones({4}, mesh, {Shard(0)}));
    expect_throws<ValueError>([&] { broadcast_state_dict(sharded, mesh); }, "'w' is a DTensor");
  });
}

TEST_CASE("row 9: get_full_params: copies that outlive training, tied weights one tensor") {
  run_ranks(2, [](int) {
    const auto mesh = dp_mesh();
    const auto plain = transformer_with_shared_params().init({.mesh = mesh, .deterministic = true});
    const auto model = transformer_with_shared_params().init(
        {.mesh = mesh, .fsdp_init_mode = FSDPInitMode::RECURSIVE, .deterministic = true});
    const auto full = get_full_params(*model);
    const auto own_only = get_full_params(*model, /*recurse=*/false);
    zero_model(*model);
    const auto expected = plain->parameters();
    expect_equal(full.size(), 69u);
    int64_t shards = 0, aliases = 0;
    for (size_t i = 0; i < full.size(); ++i) {
      TESSERA_EXPECT(!is_dtensor(full[i]));
      expect_bit_equal(full[i], expected[i].detach());
      shards += is_dtensor(own_only[i]);
      for (size_t j = 0; j < i; ++j) {
        aliases += full[i].is_same(full[j]);
      }
    }
    expect_equal(shards, 2 * 12 + 2 * 18);
    expect_equal(aliases, 1);
  });
}

TEST_CASE("row 10: the dummy group is done at once and moves nothing") {
  DummyProcessGroup group(3, 8);
  CHECK(group.getRank() == 3);
  CHECK(group.getSize() == 8);
  std::vector<at::Tensor> tensors{at::full({2}, 5.f)};
  const auto work = group.allreduce(tensors);
  CHECK(work->isCompleted());
  CHECK(work->getFuture()->completed());
  CHECK(work->getFuture()->value().toInt() == 1);
  CHECK(tensors[0].sum().item<float>() == 10.f);
}

TEST_CASE("row 36: check_sharded_parity: one wrong element on one rank, or a parameter less, is found") {
  run_ranks(2, [](int rank) {
    const auto mesh = dp_mesh();
    const auto reference = nested(mesh, false);
    const auto sharded = nested(mesh, true);
    check_sharded_parity(*reference, *sharded);
    {
      const at::NoGradGuard no_grad;
      to_local(sharded->named_parameters()["module.2.bias"].detach())[0].add_(rank);
    }
    const auto compare = [&] { check_sharded_parity(*reference, *sharded); };
    if (rank == 1) {
      expect_throws<ExpectationError>(compare, "the local tensor of parameter 'module.2.bias'");
    } else {
      compare();
    }
    const auto longer = non_uniform_req_grad_model().init({.mesh = mesh, .deterministic = true});
    expect_throws<ExpectationError>([&] { check_sharded_parity(*longer, *sharded); }, "is named 'module.2.weight'");
    longer->register_parameter("last", at::ones({1}));
    expect_throws<ExpectationError>([&] { check_sharded_parity(*longer, *sharded); }, "10 parameters, expected 11");
    expect_throws<ExpectationError>([&] { check_sharded_parity(*reference, *nested(mesh, false)); },
                                    "is not a DTensor");
    // The other rank may still be drawing `longer` from the generator that both share.
    const auto draw = [] {
      const BuildScope build(std::nullopt);
      return tessera::nn::Linear(3, 5);
    };
    auto plain = draw(), same = draw();
    tessera::nn::Sequential wrapped;
    wrapped->push_back("wrapper", plain);
    {
      const at::NoGradGuard no_grad;
      same->weight.copy_(plain->weight);
      same->bias.copy_(plain->bias);
    }
    fully_shard(wrapped, {.mesh = mesh});
    expect_throws<ExpectationError>([&] { check_sharded_parity(*same, *wrapped); }, "is named 'wrapper.weight'");
    check_sharded_parity(*same, *wrapped, {.prefixes_to_ignore = {"wrapper."}});
  });
}

TEST_CASE("row 37: check_sharded_parity: two cuts of one dim are compared in the order in which they were made") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    tessera::nn::Linear reference(3, 7), sharded(3, 7);
    {
      const at::NoGradGuard no_grad;
      reference->weight.copy_(at::randn({7, 3}, make_generator(5)));
      reference->bias.copy_(at::randn({7}, make_generator(6)));
      sharded->weight.copy_(reference->weight);
      sharded->bias.copy_(reference->bias);
    }
    distribute_parameter(*sharded, "weight", mesh["tp"], {Shard(0)});
    fully_shard(sharded, {.mesh = mesh["dp"]});
    expect_equal(placements(sharded->weight).size(), 2u);
    check_sharded_parity(reference, sharded);
    check_sharded_parity(*reference, sharded);
    check_sharded_parity(reference, *sharded, {.gradients = false});
    {
      const at::NoGradGuard no_grad;
      reference->weight.copy_(reference->weight.flip({0}));
    }
    expect_throws<ExpectationError>([&] { check_sharded_parity(reference, sharded); }, "parameter 'weight'");
  });
}

TEST_CASE("check_sharded_parity: a pending sum is compared by what it comes to") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    tessera::nn::Linear reference(3, 4), sharded(3, 4);
    const auto weight = at::randn({4, 3}, make_generator(5));
    {
      const at::NoGradGuard no_grad;
      for (const auto& linear : {reference, sharded}) {
        linear->weight.copy_(weight);
        linear->bias.zero_();
      }
    }
    distribute_module(*sharded, mesh);
    const auto input = at::randn({6, 3}, make_generator(6));
    reference(input).pow(2).sum().backward();
    sharded(distribute_tensor(input, mesh, {Shard(0)})).pow(2).sum().backward();
    check_sharded_parity(reference, sharded);
    const auto part = at::full({4, 3}, rank == 0 ? 1.f : -1.f);
    sharded->weight.mutable_grad() = from_local(part + reference->weight.grad() / 2, mesh, {Partial()});
    check_sharded_parity(reference, sharded);
    sharded->weight.mutable_grad() = from_local(part, mesh, {Partial()});
    expect_throws<ExpectationError>([&] { check_sharded_parity(reference, sharded); },
                                    "the local tensor of the gradient of 'weight'");
  });
}

TEST_CASE("row 38: check_sharded_parity: gradients are compared, and undefined matches only undefined") {
  run_ranks(2, [](int) {
    const auto mesh = dp_mesh();
    const auto reference = nested(mesh, false);
    const auto sharded = nested(mesh, true);
    const auto input = at::randn({4, 8}, make_generator(1));
    const auto compare = [&] { check_sharded_parity(*reference, *sharded); };
    forward_and_backward(*sharded, input);
    expect_throws<ExpectationError>(compare, "the gradient of 'module.0.weight' is defined, expected undefined");
    forward_and_backward(*reference, input);
    compare();
    sharded->parameters()[3].mutable_grad() = at::Tensor();
    expect_throws<ExpectationError>(compare, "is undefined, expected defined");
    forward_and_backward(*reference, input);
    check_sharded_parity(*reference, *sharded, {.gradients = false});
  });
}

TEST_CASE("row 39: a rank that throws ends the test in seconds with its message") {
  const auto begin = std::chrono::steady_clock::now();
  CHECK_THROWS_WITH(run_ranks(4,
                              [](int rank) {
                                TESSERA_CHECK(ValueError, rank != 2, "no luck");
                                barrier(default_group());
                              }),
                    "rank 2: no luck");
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
}

TEST_CASE("row 42: run_subtests: the cross product in order, and the combination that failed by name") {
  std::vector<std::string> calls;
  run_ranks(2, [&](int rank) {
    const auto count =
        run_subtests({{"a", {true, false}}, {"b", {1, 2, 3}}, {"c", {"x"}}, {"d", {0.5}}}, [&](const Subtest& subtest) {
          if (rank == 0) {
            calls.push_back(subtest.to_string());
          }
          TESSERA_EXPECT(subtest.get<int64_t>("b") > 0 && subtest.get<std::string>("c") == "x");
          expect_throws<KeyError>([&] { subtest.get<bool>("e"); }, "no axis 'e'");
          expect_throws<ValueError>([&] { subtest.get<double>("a"); }, "another type");
        });
    expect_equal(count, 6);
  });
  CHECK(calls == std::vector<std::string>{"a=true, b=1, c=x, d=0.5", "a=true, b=2, c=x, d=0.5",
                                          "a=true, b=3, c=x, d=0.5", "a=false, b=1, c=x, d=0.5",
                                          "a=false, b=2, c=x, d=0.5", "a=false, b=3, c=x, d=0.5"});
  CHECK_THROWS_WITH(run_ranks(2,
                              [](int rank) {
                                run_subtests({{"n", {1, 2}}}, [&](const Subtest& subtest) {
                                  TESSERA_CHECK(Error, rank == 0 || subtest.get<int64_t>("n") == 1, "a fault");
                                });
                              }),
                    "rank 1: subtest n=2: a fault");
}

TEST_CASE("row 52: a test runs in every execution mode, with equal results; a failure names the mode") {
  run_ranks(2, [](int) {
    const auto mesh = dp_mesh();
    const auto reference = nested(mesh, false);
    const auto input = at::randn({4, 8}, make_generator(1));
    forward_and_backward(*reference, input);
    std::vector<std::string> names;
    for_each_execution_mode([&](const ExecutionMode& mode) {
      names.push_back(mode.name);
      InitOptions options{.mesh = mesh, .fsdp_init_mode = FSDPInitMode::RECURSIVE, .deterministic = true};
      options.shard = mode.shard;
      const auto model = nested_wrapped_model().init(options);
      wrap_unit(*model, options);
      expect_equal(find_hook_point(*model)->is_forward_wrapped(), mode.name == "checkpointed");
      forward_and_backward(*model, input);
      check_sharded_parity(*reference, *model);
    });
    expect_equal(names, std::vector<std::string>{"eager", "checkpointed"});
    expect_throws<ExpectationError>(
        [] { for_each_execution_mode([](const ExecutionMode& mode) { throw Error("in " + mode.name); }); },
        "execution mode eager: in eager");
    int64_t filtered = 0;
    for_each_execution_mode(
        [&](const ExecutionMode& mode) {
          tessera::nn::Linear layer(2, 2);
          mode.shard(*layer, {.mesh = mesh});
          filtered += find_hook_point(*layer)->is_forward_wrapped();
        },
        [](torch::nn::Module&) { return false; });
    expect_equal(filtered, 0);
  });
}

}  // namespace tessera::testing
