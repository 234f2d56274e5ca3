// Random generators in a checkpoint.

#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint/rng_state.h"
#include "comm/collectives.h"
#include "dtensor/dtensor.h"
#include "dtensor/factories.h"
#include "dtensor/random/random.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

TEST_CASE("random generators go on where they were when they were saved, on more ranks too") {
  const TempFolder folder;
  const auto path = folder.path("saved");
  at::Tensor of_dtensors, plain;
  // Ranks that are threads share libtorch's default generator: rank 0 alone draws from it, or sets it last.
  const auto draw = [&](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {get_world_size()}, {"dp"});
    auto values = full_tensor(zeros({5, 3}, mesh, {Shard(0)}).normal_());
    barrier(default_group());
    return std::pair(values, rank == 0 ? at::randn({4}) : at::Tensor());
  };
  run_ranks(2, [&](int rank) {
    manual_seed(7);
    draw(rank);
    barrier(default_group());
    dcp::save(path, {.user = dcp::get_rng_state()});
    const auto [values, own] = draw(rank);
    if (rank == 0) {
      of_dtensors = values;
      plain = own;
    }
  });
  run_ranks(3, [&](int rank) {
    auto rng = dcp::rng_state_to_load(path);
    TESSERA_EXPECT(rng.count("rng.dtensor.cpu") == 1);
    TESSERA_EXPECT(rng.size() == (rank < 2 ? 2u : 1u));
    dcp::State state{.user = rng};
    dcp::load(path, state);
    dcp::set_rng_state(rng);
    const auto [values, own] = draw(rank);
    expect_bit_equal(values, of_dtensors);
    if (rank == 0) {
      expect_bit_equal(own, plain);
    }
    expect_throws<ValueError>(
        [] {
          dcp::set_rng_state({{"rng.dtensor.cpu", at::zeros({3}, at::kByte)}});
        },
        "rng.dtensor.cpu: ");
    expect_throws<ValueError>([] { dcp::set_rng_state({{"rng.dtensor.cpu", 3.}}); }, "rng.dtensor.cpu: not a tensor");
  });
}

namespace {

/// Two stages, each on half of the ranks, of which the last has drawn more.
at::Tensor draw_in_stage(int rank) {
  const int half = get_world_size() / 2;
  std::vector<int64_t> members;
  for (int i = 0; i < half; ++i) {
    members.push_back(i + (rank < half ? 0 : half));
  }
  return full_tensor(zeros({4}, init_device_mesh(at::kCPU, {half}, {}, members), {Shard(0)}).normal_());
}

}  // namespace

TEST_CASE("ranks whose DTensors have drawn differently go on each from its own state") {
  const TempFolder folder;
  const auto path = folder.path("saved");
  std::vector<at::Tensor> expected(4);
  run_ranks(4, [&](int rank) {
    manual_seed(7);
    if (rank >= 2) {
      draw_in_stage(rank);
    }
    const auto state = dcp::get_rng_state();
    dcp::save(path, {.user = state});
    expected[static_cast<size_t>(rank)] = draw_in_stage(rank);
    dcp::set_rng_state(state);
    expect_bit_equal(draw_in_stage(rank), expected[static_cast<size_t>(rank)]);
  });
  CHECK(!expected[0].equal(expected[2]));
  run_ranks(4, [&](int rank) {
    dcp::State state{.user = dcp::rng_state_to_load(path)};
    dcp::load(path, state);
    dcp::set_rng_state(state.user);
    expect_bit_equal(draw_in_stage(rank), expected[static_cast<size_t>(rank)]);
  });
  run_ranks(2, [&](int) {
    expect_throws<ValueError>([&] { dcp::rng_state_to_load(path); },
                              "the generators that DTensors draw from differed between the 4 ranks that saved");
  });
}

TEST_CASE("a checkpoint that has the generator of DTensors once is loaded on every rank") {
  const TempFolder folder;
  const auto path = folder.path("saved");
  at::Tensor expected;
  run_ranks(2, [&](int rank) {
    manual_seed(7);
    dcp::save(path, {.user = {{"rng.dtensor.cpu", dcp::get_rng_state().at("rng.dtensor.cpu")}}});
    const auto values = full_tensor(zeros({5}, init_device_mesh(at::kCPU, {2}, {"dp"}), {Shard(0)}).normal_());
    if (rank == 0) {
      expected = values;
    }
  });
  run_ranks(3, [&](int) {
    dcp::State state{.user = dcp::rng_state_to_load(path)};
    expect_equal(state.user.size(), size_t{1});
    dcp::load(path, state);
    dcp::set_rng_state(state.user);
    expect_bit_equal(full_tensor(zeros({5}, init_device_mesh(at::kCPU, {3}, {"dp"}), {Shard(0)}).normal_()), expected);
  });
}

}  // namespace tessera::testing
