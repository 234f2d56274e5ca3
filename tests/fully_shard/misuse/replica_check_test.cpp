// check_replicas: replicas that differ are found, wherever one does, on every rank.

#include "fully_shard/replica_check.h"

#include "checkpoint/state_dict.h"
#include "dtensor/dtensor.h"
#include "fully_shard/replicate.h"
#include "parallel/distribute_module.h"
#include "parallel/linear_styles.h"
#include "parallel/parallelize_module.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

// Changes one element of this rank's part.
void change(const at::Tensor& param) {
  const at::NoGradGuard no_grad;
  (is_dtensor(param) ? to_local(param.detach()) : param.detach()).view({-1})[0].add_(1);
}

}  // namespace

TEST_CASE("equal replicas pass, also after training, and so does a model without replicas") {
  run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicas", "shards"});
    auto hsdp = filled_tower(1);
    shard_tower(hsdp, {.mesh = mesh});
    check_replicas(hsdp);
    hsdp(make_batch(static_cast<uint64_t>(rank), 3, 5)).sum().backward();
    check_replicas(hsdp);
    auto sharded = filled_tower(static_cast<uint64_t>(rank));
    shard_tower(sharded);
    check_replicas(sharded);
  });
}

TEST_CASE("a replica that was built from another seed is refused on every rank, and may take rank 0's values") {
  const int world_size = GENERATE(2, 3, 4);
  run_ranks(world_size, [](int rank) {
    auto tower = filled_tower(rank == 1 ? 2 : 1);
    replicate(tower);
    expect_throws<ValueError>([&] { check_replicas(tower); },
                              "' of root has other values on rank 1 than on rank 0. Build the model");
    dcp::set_model_state_dict(tower, dcp::get_model_state_dict(tower, {.full_state_dict = true}),
                              {.broadcast_from_rank0 = true});
    check_replicas(tower);
  });
}

TEST_CASE("one element of one shard of one replica is enough") {
  run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicas", "shards"});
    auto tower = filled_tower(1);
    shard_tower(tower, {.mesh = mesh});
    if (rank == 3) {
      change(tower->blocks[2]->down->weight);
    }
    expect_throws<ValueError>([&] { check_replicas(tower); },
                              "parameter 'down.weight' of block2 has other values on rank 3 than on rank 1");
  });
}

TEST_CASE("ranks that run a replica together by tensor parallelism are told, too") {
  run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    auto tower = filled_tower(1);
    distribute_parameter(*tower->blocks[0]->up, "weight", mesh["tp"], {Shard(0)});
    replicate(tower, {.mesh = mesh["dp"]});
    check_replicas(tower);
    if (rank == 2) {
      change(tower->out->weight);  // plain over tp: rank 3 and its replica 1 are equal
    }
    expect_throws<ValueError>([&] { check_replicas(tower); },
                              "parameter 'out.weight' of root has other values on rank 2 than on rank 0");
  });
}

TEST_CASE("what a plan leaves plain, or replicates, is compared along its axis, with and without replicas") {
  const bool replicates = GENERATE(false, true);
  run_ranks(4, [&](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    const auto sharded_tower = [&](uint64_t seed) {
      auto tower = filled_tower(seed);
      parallelize_module(
          tower, mesh["tp"],
          {{"block0.up", ColwiseParallel()}, {"block0.down", RowwiseParallel({.output_layouts = Replicate()})}});
      replicates ? replicate(tower, {.mesh = mesh["dp"]}) : fully_shard(tower, {.mesh = mesh["dp"]});
      return tower;
    };
    auto tower = sharded_tower(1);
    check_replicas(tower);
    weighted_loss(tower(make_batch(static_cast<uint64_t>(mesh.local_rank("dp")), 3, 5))).backward();
    check_replicas(tower);

    // Each rank along tp from a seed of its own: the plan's weights are those of one of them, all else differs.
    auto other = sharded_tower(static_cast<uint64_t>(mesh.local_rank("tp")));
    expect_throws<ValueError>([&] { check_replicas(other); },
                              "parameter 'in.weight' of root has other values on rank 1 than on rank 0");

    if (rank == 3) {
      change(tower->norm->weight);
      change(tower->blocks[0]->down->bias);
    }
    check_replicas(tower, {tower->norm->weight, tower->blocks[0]->down->bias});
    const auto text = replicates ? "has other values on rank 3 than on rank 0" : "on rank 3 than on rank 2";
    expect_throws<ValueError>([&] { check_replicas(tower, {tower->norm->weight}); }, text);
    expect_throws<ValueError>([&] { check_replicas(tower, {tower->blocks[0]->down->bias}); }, text);
    expect_throws<ValueError>([&] { check_replicas(tower); }, "'block0.down.bias' of root");
  });
}

TEST_CASE("a model with a plan alone is compared along the plan's axis; one of shards alone has nothing to compare") {
  run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    auto tower = filled_tower(static_cast<uint64_t>(mesh.local_rank("dp")));
    parallelize_module(tower, mesh["tp"], {{"block0.up", ColwiseParallel()}, {"block0.down", RowwiseParallel()}});
    check_replicas(tower);
    if (rank == 2) {
      change(tower->out->bias);
    }
    if (mesh.local_rank("dp") == 1) {
      expect_throws<ValueError>([&] { check_replicas(tower); },
                                "parameter 'out.bias' has other values on rank 3 than on rank 2");
    } else {
      check_replicas(tower);
    }
    check_replicas(tower, {tower->out->bias});
    auto sharded = filled_tower(static_cast<uint64_t>(rank));
    shard_tower(sharded, {.mesh = mesh["dp"]});
    check_replicas(sharded);
    expect_throws<StateError>([&] { check_replicas(sharded->norm); }, "nor a module below it is a unit");
  });
}

TEST_CASE("a parameter that trains in no unit is named, with and without replicas, before and after training") {
  const bool replicates = GENERATE(false, true);
  run_ranks(2, [&](int rank) {
    auto tower = filled_tower(1);
    for (auto& block : tower->blocks) {
      replicates ? replicate(block) : fully_shard(block);
    }
    const std::string_view left = "parameter 'in.weight' requires a gradient, but is in no unit";
    for (int step = 0; step < 2; ++step) {
      expect_throws<StateError>([&] { check_replicas(tower); }, left);
      expect_throws<ExpectationError>([&] { check_sharded_parity(filled_tower(1), tower); }, "no unit has it");
      check_replicas(tower->blocks[0]);
      weighted_loss(tower(make_batch(static_cast<uint64_t>(rank), 3, 5))).backward();
    }
    std::vector<at::Tensor> others;
    for (const auto& param : tower->parameters()) {
      if (!is_dtensor(param)) {
        others.push_back(param);
      }
    }
    check_replicas(tower, others);
    for (auto& param : others) {
      param.set_requires_grad(false);
    }
    check_replicas(tower);
  });
}

TEST_CASE("parameters that a unit ignores, and those of units above, are not taken for forgotten ones") {
  run_ranks(2, [](int) {
    auto tower = filled_tower(1);
    fully_shard(tower->blocks[1]->up);
    fully_shard(tower, {.ignored_params = {tower->in->weight, tower->blocks[1]->down->bias}});
    check_replicas(tower);
    check_replicas(tower->blocks[1], {tower->blocks[1]->down->bias});
    tower->register_parameter("late", make_batch(1, 2, 2));
    expect_throws<StateError>([&] { check_replicas(tower); }, "parameter 'late'");
  });
}

TEST_CASE("check_replicas refuses what has no replicas to compare") {
  Tower tower;
  expect_throws<StateError>([&] { check_replicas(tower); }, "nor a module below it is a unit");
}

}  // namespace tessera::testing
