// Saved from any layout, loaded into any other: the files are the same byte by byte, and so are model and Adam's state.

#include <c10/core/InferenceMode.h>

#include "checkpoint/format/manifest.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "testing/tensor_matchers.h"
#include "tests/checkpoint/layouts.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// Every tensor whole, and every value, as text or tensor.
void expect_same_state(const dcp::State& actual, const dcp::State& expected) {
  for (const auto section : {&dcp::State::model, &dcp::State::optimizer}) {
    expect_equal((actual.*section).size(), (expected.*section).size());
    for (const auto& [key, value] : expected.*section) {
      const auto& own = (actual.*section).at(key);
      if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
        expect_bit_equal(std::get<at::Tensor>(own), *tensor);
      } else {
        TESSERA_EXPECT(own.index() == value.index());
        TESSERA_EXPECT(std::holds_alternative<double>(value) ? std::get<double>(own) == std::get<double>(value)
                                                             : std::get<int64_t>(own) == std::get<int64_t>(value));
      }
    }
  }
}

/// Trains two steps on `layout` and saves; the whole state comes back.
dcp::State train_and_save(const TestLayout& layout, const std::string& path) {
  dcp::State whole;
  run_ranks(layout.ranks, [&](int rank) {
    TestTrainer trainer(layout, 1);
    trainer.train(0);
    trainer.train(1);
    trainer.save(path, 2);
    const dcp::StateDictOptions full{.full_state_dict = true, .cpu_offload = true};
    dcp::State own{.model = dcp::get_model_state_dict(trainer.model, full),
                   .optimizer = dcp::get_optimizer_state_dict(trainer.model, trainer.optimizer, full)};
    if (rank == 0) {
      for (const auto section : {&dcp::State::model, &dcp::State::optimizer}) {
        for (auto& [key, value] : own.*section) {
          (whole.*section)[key] =
              std::holds_alternative<at::Tensor>(value) ? dcp::StateValue(std::get<at::Tensor>(value).clone()) : value;
        }
      }
    }
  });
  return whole;
}

}  // namespace

TEST_CASE("saved from each layout, loaded into each other, saved again: the same bytes") {
  const TempFolder folder;
  for (const auto& from : test_layouts()) {
    INFO("saved from " << from.name);
    const auto path = folder.path("from " + from.name);
    const auto whole = train_and_save(from, path);
    const auto files = read_files(path, ".safetensors");
    REQUIRE(files.size() == 2);
    for (const auto& to : test_layouts()) {
      INFO("loaded into " << to.name);
      const auto again = folder.path("from " + from.name + " to " + to.name);
      run_ranks(to.ranks, [&](int) {
        TestTrainer trainer(to, 2);
        expect_equal(trainer.load(path), 2);
        trainer.save(again, 2);
        expect_same_state(trainer.state(), whole);
      });
      CHECK(read_files(again, ".safetensors") == files);
      CHECK(read_files(again, ".index.json") == read_files(path, ".index.json"));
    }
  }
}

TEST_CASE("training goes on bit by bit after a load, also over state that was there before") {
  const TempFolder folder;
  for (const std::string name : {"1", "3", "2x2 FSDP+TP"}) {
    const auto& layout = test_layout(name);
    run_ranks(layout.ranks, [&](int) {
      TestTrainer through(layout, 1);
      for (int64_t step = 0; step < 5; ++step) {
        if (step == 3) {
          through.save(folder.path(name), step);
        }
        through.train(step);
      }
      TestTrainer resumed(layout, 2);
      resumed.train(7);
      for (int64_t step = resumed.load(folder.path(name)); step < 5; ++step) {
        resumed.train(step);
      }
      expect_same_state(resumed.state(), through.state());
    });
  }
}

TEST_CASE("copies are written once, and the ranks' shares are even") {
  const TempFolder folder;
  run_ranks(4, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicate", "shard"});
    const auto tensor = distribute_tensor(at::ones({64, 100}), mesh, {Replicate(), Shard(0)});
    int64_t own = 0;
    const dcp::State state{.model = {{"w", tensor}, {"plain", at::ones({8, 16})}}};
    dcp::save(folder.path("c"), state, {.progress = [&](const dcp::Progress& progress) { own = progress.bytes_done; }});
    // Each half of w is one block, of 12800 bytes, that two ranks hold.
    TESSERA_EXPECT(own == 12800 || own == 512 || own == 0);
  });
  CHECK(read_files(folder.path("c"), ".safetensors").begin()->second.size() < 27000);
}

TEST_CASE("buffers that differ between ranks are rank 0's, all of them") {
  const TempFolder folder;
  const std::vector<int64_t> sizes = {8};
  run_ranks(3, [&](int rank) {
    const auto buffers = [&](double value) {
      return dcp::State{
          .model = {{"count", at::full({}, value, at::kLong)},
                    {"mean", at::full(sizes, value)},
                    {"variance", at::full(sizes, value)},
                    {"weight", distribute_tensor(at::ones(sizes), init_device_mesh(at::kCPU, {3}), {Shard(0)})}}};
    };
    dcp::save(folder.path("c"), buffers(rank));
    auto loaded = buffers(7);
    dcp::load(folder.path("c"), loaded);
    for (const char* key : {"count", "mean", "variance"}) {
      expect_equal(std::get<at::Tensor>(loaded.model.at(key)).sum().item<double>(), 0.);
    }
  });
}

TEST_CASE("DTensors that differ between data-parallel replicas are the first replica's, all of them") {
  const TempFolder folder;
  run_ranks(4, [&](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    const auto buffers = [&](double value) {
      dcp::StateDict model;
      for (const auto* key : {"mean", "variance", "more", "most"}) {  // whose copies ranks would write in turn
        model[fmt::format("{}.cut", key)] = from_local(at::full({4}, value), mesh["tp"], {Shard(0)});
        model[fmt::format("{}.copied", key)] = from_local(at::full({8}, value), mesh["tp"], {Replicate()});
      }
      return dcp::State{.model = model};
    };
    dcp::save(folder.path("c"), buffers(rank / 2));
    auto loaded = buffers(7);
    dcp::load(folder.path("c"), loaded);
    for (const auto& [key, value] : loaded.model) {
      expect_bit_equal(full_tensor(std::get<at::Tensor>(value)), at::zeros({8}));
    }
  });
}

TEST_CASE("another dtype, dims that tensor parallelism cuts, and scalars") {
  const TempFolder folder;
  const auto values = at::randn({5, 7, 3}, make_generator(3));
  run_ranks(3, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3}, {"tp"});
    const dcp::State state{.model = {{"w", distribute_tensor(values, mesh, {Shard(1)})},
                                     {"last", distribute_tensor(values, mesh, {Shard(2)})},
                                     {"scalar", at::full({}, 2.5)},
                                     {"empty", at::empty({0, 4})},
                                     {"ints", distribute_tensor(at::arange(7), mesh, {Shard(0)})},
                                     {"flag", at::ones({3}, at::kBool)}}};
    dcp::save(folder.path("c"), state);
    dcp::State loaded{.model = {{"w", distribute_tensor(at::zeros({5, 7, 3}, at::kBFloat16), mesh, {Shard(2)})},
                                {"last", distribute_tensor(at::zeros({5, 7, 3}, at::kDouble), mesh, {Shard(0)})},
                                {"scalar", at::zeros({})},
                                {"empty", at::empty({0, 4})},
                                {"ints", at::zeros({7}, at::kLong)},
                                {"flag", at::zeros({3}, at::kBool)}}};
    dcp::load(folder.path("c"), loaded);
    const auto get = [&](const char* key) { return std::get<at::Tensor>(loaded.model.at(key)); };
    expect_bit_equal(get("w"), values.to(at::kBFloat16));
    expect_bit_equal(get("last"), values.to(at::kDouble));
    expect_bit_equal(get("scalar"), at::full({}, 2.5));
    expect_bit_equal(get("ints"), at::arange(7));
    expect_bit_equal(get("flag"), at::ones({3}, at::kBool));
  });
}

TEST_CASE("large tensors, however they lie; autograd sees that they changed") {
  const TempFolder folder;
  const auto values = at::randn({301, 103}, make_generator(4));  // 124 KB; a rank's part is large too
  run_ranks(1, [&](int) {
    dcp::save(folder.path("c"), {.model = {{"w", values}, {"t", values}, {"half", values}, {"shifted", values}}});
    const at::Tensor own = at::zeros({301, 103}).requires_grad_();
    const at::Tensor loss = (own * own).sum();
    const at::Tensor shifted = at::full({301 * 103 + 2}, 7.0).narrow(0, 1, 301 * 103).view({301, 103});
    dcp::State loaded{.model = {{"w", own},
                                {"t", at::zeros({103, 301}).t()},
                                {"half", at::zeros({301, 103}, at::kBFloat16)},
                                {"shifted", shifted}}};
    dcp::load(folder.path("c"), loaded);
    expect_bit_equal(own.detach(), values);
    expect_bit_equal(std::get<at::Tensor>(loaded.model.at("t")).contiguous(), values);
    expect_bit_equal(std::get<at::Tensor>(loaded.model.at("half")), values.to(at::kBFloat16));
    expect_bit_equal(shifted, values);
    const at::Tensor around = shifted.as_strided({2}, {301 * 103 + 1}, 0);
    expect_bit_equal(around, at::full({2}, 7.0));
    expect_throws<c10::Error>([&] { loss.backward(); }, "modified by an inplace operation");

    const c10::InferenceMode no_versions;
    dcp::State inference{.model = {{"w", at::zeros({301, 103})}}};
    dcp::load(folder.path("c"), inference, {.strict = false});
    expect_bit_equal(std::get<at::Tensor>(inference.model.at("w")), values);
  });
}

TEST_CASE("values, tensors without a place to load into, and keys that only some ranks have") {
  const TempFolder folder;
  run_ranks(3, [&](int rank) {
    dcp::State state{.user = {{"step", int64_t{7}},
                              {"loss", 0.1},
                              {"name", std::string("run")},
                              {fmt::format("rng.{}", rank), at::full({rank + 2}, rank, at::kByte)}}};
    dcp::save(folder.path("c"), state);
  });
  run_ranks(2, [&](int rank) {
    dcp::State state{.user = {{"step", int64_t{0}}, {"loss", 0.0}, {"name", std::string()}, {"rng.2", at::Tensor()}}};
    if (rank == 1) {
      state.user["rng.0"] = at::zeros({2}, at::kByte);
    }
    const auto result = dcp::load(folder.path("c"), state);
    TESSERA_EXPECT(result.missing_keys.empty() && result.unexpected_keys.empty());
    expect_equal(std::get<int64_t>(state.user["step"]), 7);
    expect_equal(std::get<double>(state.user["loss"]), 0.1);
    expect_equal(std::get<std::string>(state.user["name"]), "run");
    expect_bit_equal(std::get<at::Tensor>(state.user["rng.2"]), at::full({4}, 2, at::kByte));
  });
}

TEST_CASE("ranks that have other layers each load theirs; a key that no rank asks for is unexpected on all") {
  const TempFolder folder;
  run_ranks(3, [&](int rank) {
    const auto own = [&](double value) {
      dcp::State state{.model = {{fmt::format("layer{}", rank), at::full({4}, value)}}};
      if (rank == 1) {  // whose layers alone are trained
        state.optimizer["layer1.exp_avg"] = at::full({4}, value);
      }
      return state;
    };
    dcp::save(folder.path("c"), own(rank + 1));
    auto loaded = own(0);
    const auto result = dcp::load(folder.path("c"), loaded);
    TESSERA_EXPECT(result.missing_keys.empty() && result.unexpected_keys.empty());
    expect_same_state(loaded, own(rank + 1));

    auto less = rank == 2 ? dcp::State() : own(0);
    less.optimizer.clear();
    if (rank == 0) {
      less.model["more"] = at::zeros({4});
    }
    expect_throws<KeyError>([&] { dcp::load(folder.path("c"), less); },
                            "keys that it lacks: 1 (more); keys that are not to be loaded: 1 (layer2)");
    const auto partly = dcp::load(folder.path("c"), less, {.strict = false});
    expect_equal(partly.missing_keys, rank == 0 ? std::vector<std::string>{"more"} : std::vector<std::string>());
    expect_equal(partly.unexpected_keys, std::vector<std::string>{"layer2"});
  });
}

TEST_CASE("a model is exported to one file by all ranks, and imported by one") {
  const TempFolder folder;
  const auto file = folder.path("model.safetensors");
  for (const std::string name : {"2", "2x2 FSDP+TP"}) {
    run_ranks(test_layout(name).ranks, [&](int) {
      TestTrainer trainer(test_layout(name), 1);
      dcp::export_safetensors(file, dcp::get_model_state_dict(trainer.model));
    });
    CHECK(names_in(folder.path("")) == std::vector<std::string>{"model.safetensors"});
    TestTrainer plain(test_layout("1"), 2);
    dcp::State state{.model = dcp::get_model_state_dict(plain.model)};
    dcp::load(file, state);
    expect_same_state({.model = state.model}, {.model = TestTrainer(test_layout("1"), 1).state().model});
  }
}

TEST_CASE("a whole model that rank 0 alone has is exported; no model at all is refused, on every rank") {
  const TempFolder folder;
  const auto file = folder.path("model.safetensors");
  run_ranks(2, [&](int rank) {
    TestTrainer trainer(test_layout("2"), 1);
    const auto model = dcp::get_model_state_dict(trainer.model, {.full_state_dict = true, .cpu_offload = true});
    TESSERA_EXPECT(model.empty() == (rank == 1));
    dcp::export_safetensors(file, model);
    dcp::StateDict with_value = model;
    if (rank == 1) {
      with_value["step"] = int64_t{1};
    }
    expect_throws<ValueError>([&] { dcp::export_safetensors(file, with_value); }, "the model's state has values");
    expect_throws<ValueError>([&] { dcp::export_safetensors(file, {}); }, "no rank has a tensor to export");
  });
  TestTrainer plain(test_layout("1"), 2);
  dcp::State state{.model = dcp::get_model_state_dict(plain.model)};
  dcp::load(file, state);
  expect_same_state({.model = state.model}, {.model = TestTrainer(test_layout("1"), 1).state().model});
}

}  // namespace tessera::testing
