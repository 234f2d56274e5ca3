// Terms of the loss that a program computes with the parameters themselves, as penalties of their size.

#include <ATen/TensorOperators.h>
#include <ATen/ops/mm.h>

#include <functional>
#include <optional>

#include "dtensor/dtensor.h"
#include "fully_shard/replicate.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/fully_shard/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

constexpr ParityOptions kSumsInAnotherOrder{.tolerance = {.rtol = 1e-4, .atol = 1e-5}};

using Term = std::function<at::Tensor(const at::Tensor& param)>;

/// Of all parameters, sharded ones and those that are whole.
at::Tensor penalty(Tower& tower, const Term& term) {
  auto sum = at::zeros({});
  for (const auto& param : tower->parameters()) {
    const auto own = term(param);
    sum = sum + (is_dtensor(own) ? full_tensor(own) : own);
  }
  return sum * 0.1;
}

at::Tensor squares(const at::Tensor& param) {
  return param.pow(2).sum();
}

using Run = std::function<void(Tower& tower, int rank)>;

/// Over two steps, the second of which adds to the gradients of the first.
void compare_with_one_process(int world_size, const std::function<void(Tower&)>& shard, const Run& run) {
  run_ranks(world_size, [&](int rank) {
    auto reference = filled_tower(), tower = filled_tower();
    shard(tower);
    average_reference(*reference, world_size, [&](int each) { run(reference, each); });
    run(tower, rank);
    check_sharded_parity(reference, tower, kSumsInAnotherOrder);
    average_reference(*reference, world_size, [&](int each) {
      run(reference, each);
      run(reference, each);
    });
    run(tower, rank);
    check_sharded_parity(reference, tower, kSumsInAnotherOrder);
  });
}

}  // namespace

TEST_CASE("a term of the loss that is made of the parameters counts once, as in one process", "[loss_terms]") {
  const int world_size = GENERATE(1, 2, 3, 4);
  const std::optional<bool> reshards = GENERATE(std::optional<bool>(), std::optional(true), std::optional(false));
  const auto term = GENERATE(
      as<Term>(), squares, [](const at::Tensor& param) { return param.sum(); },  // whose gradient is expanded
      [](const at::Tensor& param) { return param.norm(); },
      [](const at::Tensor& param) {  // whose gradient does not lie as the parameter
        return param.dim() == 2 ? at::mm(param.t(), param).pow(2).sum() : param.sum();
      });
  const auto shard = [&](Tower& tower) { shard_tower(tower, {.reshard_after_forward = reshards}); };
  CHECK_NOTHROW(compare_with_one_process(world_size, shard, [&](Tower& tower, int rank) {
    const auto loss = micro_batch_loss(tower, rank);
    (loss + penalty(tower, term)).backward();
  }));
}

TEST_CASE("so it does with replicas, on the host, and where other dims are cut", "[loss_terms]") {
  const Run run = [](Tower& tower, int rank) {
    const auto loss = micro_batch_loss(tower, rank);
    (loss + penalty(tower, squares)).backward();
  };
  const auto replicas = [](Tower& tower) {
    shard_tower(tower, {.mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicate", "dp"})});
  };
  const auto other_dims = [](Tower& tower) {
    shard_tower(tower,
                {.shard_placement_fn = [](const at::Tensor& param) { return std::optional(Shard(param.dim() - 1)); }});
  };
  const auto offloads = [](Tower& tower) { shard_tower(tower, {.offload_policy = CPUOffloadPolicy{}}); };
  const auto replicates = [](Tower& tower) {
    replicate(tower->blocks[0]);
    replicate(tower);
  };
  CHECK_NOTHROW(compare_with_one_process(4, replicas, run));
  CHECK_NOTHROW(compare_with_one_process(3, other_dims, run));
  CHECK_NOTHROW(compare_with_one_process(3, offloads, run));
  CHECK_NOTHROW(compare_with_one_process(3, replicates, run));
}

TEST_CASE("a term may have a backward of its own, and micro-batches may be reduced once", "[loss_terms]") {
  const int world_size = GENERATE(1, 3);
  const auto shard = [](Tower& tower) { shard_tower(tower); };
  CHECK_NOTHROW(compare_with_one_process(world_size, shard, [](Tower& tower, int rank) {
    penalty(tower, squares).backward();
    micro_batch_loss(tower, rank).backward();
    penalty(tower, squares).backward();
  }));
  CHECK_NOTHROW(compare_with_one_process(world_size, shard, [](Tower& tower, int rank) {
    const bool is_sharded = is_dtensor(tower->in->weight);
    for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
      if (is_sharded) {
        fsdp(tower).set_requires_gradient_sync(micro_batch == 2);
      }
      const auto loss = micro_batch_loss(tower, rank, micro_batch);
      (loss + penalty(tower, squares)).backward();
    }
  }));
}

TEST_CASE("a term whose gradient comes when others are reduced is refused with the remedies", "[loss_terms]") {
  const int world_size = GENERATE(1, 2, 3);
  run_ranks(world_size, [&](int rank) {
    auto reference = filled_tower(), tower = filled_tower();
    shard_tower(tower);
    const auto refused = [&] {
      const auto early = full_tensor(squares(tower->blocks[2]->up->weight));
      (micro_batch_loss(tower, rank) + early).backward();
    };
    expect_throws<StateError>(refused, "Compute such a term after the model's forward");
    tower->zero_grad();
    const auto loss = micro_batch_loss(tower, rank);
    (loss + penalty(tower, squares)).backward();
    average_reference(*reference, world_size, [&](int each) {
      const auto own = micro_batch_loss(reference, each);
      (own + penalty(reference, squares)).backward();
    });
    check_sharded_parity(reference, tower, kSumsInAnotherOrder);
  });
}

}  // namespace tessera::testing
