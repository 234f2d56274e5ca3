// Full parameters that a program changes in place while their unit is unsharded: what the shards would lose is an
// error, and what is kept is none.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include "dtensor/dtensor.h"
#include "fsdp1/fsdp.h"
#include "fully_shard/replicate.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

constexpr const char* kLost = "was changed in place while its unit was unsharded";

void double_it(const at::Tensor& param) {
  const at::NoGradGuard no_grad;
  at::Tensor(param).mul_(2);
}

/// One step of it is as that of a model which nobody wrote, or of `reference`.
void expect_untouched(Tower& tower, int rank, int world_size, Tower reference = filled_tower()) {
  reference->zero_grad();
  tower->zero_grad();
  average_reference(*reference, world_size, [&](int each) { micro_batch_loss(reference, each).backward(); });
  micro_batch_loss(tower, rank).backward();
  check_sharded_parity(reference, tower);
}

}  // namespace

TEST_CASE("a write to the outermost unit after its forward is an error of its backward", "[written_params]") {
  const int world_size = GENERATE(2, 3, 4);
  run_ranks(world_size, [&](int rank) {
    auto tower = sharded_tower();
    auto loss = micro_batch_loss(tower, rank);
    double_it(tower->out->bias);  // which autograd does not save
    expect_throws<StateError>([&] { loss.backward(); }, kLost);
    expect_untouched(tower, rank, world_size);
  });
}

TEST_CASE("a write to the outermost unit after its forward is an error of its next forward", "[written_params]") {
  const int world_size = GENERATE(2, 3);
  run_ranks(world_size, [&](int rank) {
    auto tower = sharded_tower();
    micro_batch_loss(tower, rank);
    double_it(tower->in->weight);
    expect_throws<StateError>([&] { micro_batch_loss(tower, rank); }, "parameter 'in.weight' of ");
    expect_untouched(tower, rank, world_size);
  });
}

TEST_CASE("a write while backward runs, by a hook of an optimizer, is an error of that backward", "[written_params]") {
  run_ranks(2, [](int rank) {
    auto tower = sharded_tower();
    bool writes = true;
    tower->blocks[1]->up->bias.register_hook([&](const at::Tensor& grad) {
      if (writes) {
        double_it(tower->blocks[1]->up->bias);
      }
      return grad;
    });
    auto loss = micro_batch_loss(tower, rank);
    expect_throws<StateError>([&] { loss.backward(); }, kLost);
    writes = false;
    expect_untouched(tower, rank, 2);
  });
}

TEST_CASE("reshard() of a unit that was unshard()ed and written throws, and the unit is sharded", "[written_params]") {
  const bool has_narrow_copy = GENERATE(false, true);
  run_ranks(2, [&](int rank) {
    auto tower =
        sharded_tower({.mp_policy = {.param_dtype = has_narrow_copy ? std::optional(at::kBFloat16) : std::nullopt}});
    auto block = fsdp(tower->blocks[0]);
    const auto& weight = tower->blocks[0]->down->weight;
    const auto before = to_local(weight.detach()).clone();
    block.unshard();
    double_it(weight.detach());  // which shares the count of writes
    expect_throws<StateError>([&] { block.reshard(); }, kLost);
    TESSERA_EXPECT(is_dtensor(weight));
    expect_bit_equal(to_local(weight.detach()), before);
    block.reshard();

    block.unshard();
    const auto sum = weight.sum();  // to read is no fault
    block.reshard();
    if (!has_narrow_copy) {
      expect_untouched(tower, rank, 2);
    }
  });
}

TEST_CASE("reshard_all() names the first one that was written, and shards all units", "[written_params]") {
  run_ranks(2, [](int) {
    auto tower = sharded_tower();
    for (auto& block : tower->blocks) {
      fsdp(block).unshard();
    }
    double_it(tower->blocks[1]->up->weight);
    expect_throws<StateError>([&] { reshard_all(tower); }, "parameter 'up.weight' of ");
    for (const auto& param : tower->parameters()) {
      TESSERA_EXPECT(is_dtensor(param));
    }
    reshard_all(tower);
  });
}

TEST_CASE("where one rank alone wrote, whole parameters are refused on all", "[written_params]") {
  run_ranks(3, [](int rank) {
    auto tower = sharded_tower();
    const auto write = [&] {
      micro_batch_loss(tower, rank);
      if (rank == 1) {
        double_it(tower->norm->weight);
      }
    };
    const auto* text = rank == 1 ? kLost : "rank 1 cannot: ";
    write();
    expect_throws<StateError>([&] { FSDP::summon_full_params(*tower, {}, [] {}); }, text);
    write();
    expect_throws<StateError>([&] { FSDP::state_dict(*tower); }, text);
    FSDP::summon_full_params(*tower, {}, [] {});
    expect_untouched(tower, rank, 3);
  });
}

TEST_CASE("a DTensor of the shards, taken before, may be written: the next forward has that", "[written_params]") {
  run_ranks(2, [](int rank) {
    auto reference = filled_tower(), tower = sharded_tower();
    const auto handle = tower->in->weight.detach();
    micro_batch_loss(tower, rank);
    double_it(handle);
    double_it(reference->in->weight);
    average_reference(*reference, 2, [&](int each) { micro_batch_loss(reference, each).backward(); });
    micro_batch_loss(tower, rank).backward();
    check_sharded_parity(reference, tower);
  });
}

TEST_CASE("rows and columns of shards may be written", "[written_params]") {
  const int world_size = GENERATE(2, 3, 4);
  run_ranks(world_size, [&](int rank) {
    auto reference = filled_tower(), tower = sharded_tower();
    const auto write = [](const at::Tensor& weight, const at::Tensor& column) {
      const at::NoGradGuard no_grad;
      weight.select(0, 3).zero_();
      weight.slice(0, 1, weight.size(0), 5).mul_(2);
      weight.narrow(0, 2, 9).select(1, 1).copy_(column);
    };
    const auto column = make_batch(7, 1, 9)[0];
    for (int step = 0; step < 2; ++step) {
      write(reference->in->weight, column);
      write(tower->in->weight, distribute_tensor(column, device_mesh(tower->in->weight), {Shard(0)}));
      expect_untouched(tower, rank, world_size, reference);
    }
    auto loss = micro_batch_loss(tower, rank);
    const at::NoGradGuard no_grad;
    tower->blocks[0]->up->weight.select(0, 1).zero_();
    expect_throws<StateError>([&] { loss.backward(); }, "'up.weight' of ");
  });
}

TEST_CASE("writes that are kept are no error: of shards, in summon_full_params, of replicas and of one rank",
          "[written_params]") {
  run_ranks(2, [](int rank) {
    auto reference = filled_tower(), tower = sharded_tower();
    const auto train = [&] {
      for (auto* model : {&reference, &tower}) {
        (*model)->zero_grad();
      }
      average_reference(*reference, 2, [&](int each) { micro_batch_loss(reference, each).backward(); });
      micro_batch_loss(tower, rank).backward();
      check_sharded_parity(reference, tower);
    };
    train();
    double_it(reference->out->bias);
    double_it(tower->out->bias);
    train();
    double_it(reference->in->weight);
    FSDP::summon_full_params(*tower, {}, [&] { double_it(tower->in->weight); });
    train();
  });
  const auto keeps_writes = [](Tower& tower, int rank, int world_size) {
    auto reference = filled_tower();
    micro_batch_loss(tower, rank);
    double_it(reference->in->weight);
    double_it(tower->in->weight);
    average_reference(*reference, world_size, [&](int each) { micro_batch_loss(reference, each).backward(); });
    micro_batch_loss(tower, rank).backward();
    check_sharded_parity(reference, tower);
  };
  run_ranks(1, [&](int rank) {
    auto tower = sharded_tower();
    keeps_writes(tower, rank, 1);
  });
  run_ranks(3, [&](int rank) {
    auto tower = filled_tower();
    replicate(tower);
    keeps_writes(tower, rank, 3);
  });
}

}  // namespace tessera::testing
