// Terms of the loss that a program computes with the parameters themselves, as penalties of their size.

#include <ATen/TensorOperators.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <optional>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/replicate.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/fully_shard/models/small_models.h"
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

/// A policy: the spread of its actions is a parameter that forward does not use, as is common.
struct PolicyImpl : torch::nn::Module {
  PolicyImpl() {
    body = register_module("body", Block(5, 3));
    mean = register_module("mean", nn::Linear(5, 3));
    log_std = register_parameter("log_std", at::zeros({3}));
    fill_parameters(*this, 1);
  }
  at::Tensor forward(const at::Tensor& x) { return mean(body(x).tanh()); }

  Block body{nullptr};
  nn::Linear mean{nullptr};
  at::Tensor log_std;
};
TESSERA_MODULE(Policy);

at::Tensor policy_loss(Policy& policy, int rank, int step, bool input_needs_gradient) {
  auto x = make_batch(static_cast<uint64_t>(10 * step + rank), 3, 5);
  x.set_requires_grad(input_needs_gradient);
  const auto mean = policy(x);
  const auto actions = make_batch(static_cast<uint64_t>(100 + rank), 3, 3);
  return ((actions - mean) / policy->log_std.exp()).pow(2).mean() + policy->log_std.sum();
}

}  // namespace

TEST_CASE("a parameter of the outermost unit that only the loss uses gets the average, first and added to a sum",
          "[loss_terms]") {
  const int world_size = GENERATE(1, 2, 3, 4);
  const bool input_needs_gradient = GENERATE(false, true);
  const bool replicates = GENERATE(false, true);
  const bool reduces_once = GENERATE(false, true);
  run_ranks(world_size, [&](int rank) {
    Policy reference, policy;
    if (replicates) {
      replicate(policy);
    } else {
      fully_shard(policy->body);
      fully_shard(policy);
    }
    for (int steps = 1; steps <= 3; ++steps) {
      average_reference(*reference, world_size, [&](int each) {
        for (int step = 0; step < steps; ++step) {
          policy_loss(reference, each, step, input_needs_gradient).backward();
        }
      });
      policy->zero_grad();
      for (int step = 0; step < steps; ++step) {
        fsdp(policy).set_requires_gradient_sync(!reduces_once || step == steps - 1);
        policy_loss(policy, rank, step, input_needs_gradient).backward();
      }
      check_sharded_parity(reference, policy, kSumsInAnotherOrder);
    }
  });
}

TEST_CASE("a sharded parameter that meets a rank's data in the loss is averaged, as its full tensor's gradients say",
          "[loss_terms]") {
  const int world_size = GENERATE(1, 2, 3, 4);
  const auto loss_of = [](Policy& policy, int rank) {
    const auto mean = policy(make_batch(static_cast<uint64_t>(rank), 3, 5));
    const auto log_std = is_dtensor(policy->log_std) ? full_tensor(policy->log_std, Placements{Partial(ReduceOp::Avg)})
                                                     : policy->log_std;
    const auto actions = make_batch(static_cast<uint64_t>(100 + rank), 3, 3);
    return ((actions - mean) / log_std.exp()).pow(2).mean() + log_std.sum();
  };
  run_ranks(world_size, [&](int rank) {
    Policy reference, policy;
    fully_shard(policy->body);
    fully_shard(policy, {.reshard_after_forward = true});
    for (int step = 0; step < 2; ++step) {
      average_reference(*reference, world_size, [&](int each) { loss_of(reference, each).backward(); });
      policy->zero_grad();
      loss_of(policy, rank).backward();
      check_sharded_parity(reference, policy, kSumsInAnotherOrder);
    }
  });
}

TEST_CASE(
    "a sharded parameter in the loss is averaged in a graph's second backward; autograd::grad() gives this rank's part",
    "[loss_terms]") {
  const int world_size = GENERATE(1, 2, 3);
  const bool replicates = GENERATE(false, true);
  run_ranks(world_size, [&](int rank) {
    Policy reference, policy;
    if (replicates) {
      replicate(policy, {.bucket_cap_mb = 1e-4});
    } else {
      fully_shard(policy->body);
      fully_shard(policy);
    }
    const auto twice = [](Policy& model, int each) {
      const auto loss = policy_loss(model, each, 0, false);
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
    };
    average_reference(*reference, world_size, [&](int each) { twice(reference, each); });
    twice(policy, rank);
    check_sharded_parity(reference, policy, kSumsInAnotherOrder);

    const auto loss = policy_loss(policy, rank, 1, false), own = policy_loss(reference, rank, 1, false);
    if (rank == 0) {  // no communication
      const auto grad = torch::autograd::grad({loss}, {policy->log_std}, {}, /*retain_graph=*/true);
      expect_close(grad[0], torch::autograd::grad({own}, {reference->log_std}, {}, /*retain_graph=*/true)[0]);
    }
    policy->zero_grad();
    loss.backward();
    average_reference(*reference, world_size, [&](int each) { policy_loss(reference, each, 1, false).backward(); });
    check_sharded_parity(reference, policy, kSumsInAnotherOrder);
  });
}

TEST_CASE("a sharded parameter in the loss is averaged after a backward that failed; a loss of it alone is an error",
          "[loss_terms]") {
  run_ranks(2, [](int rank) {
    Policy reference, policy;
    fully_shard(policy->body);
    fully_shard(policy);
    bool fails = true;
    policy->mean->weight.register_hook([&](const at::Tensor& grad) {
      TESSERA_CHECK(Error, !fails, "on purpose");
      return grad;
    });
    expect_throws<Error>([&] { policy_loss(policy, rank, 0, false).backward(); }, "on purpose");
    fails = false;
    policy(make_batch(0, 3, 5));
    expect_throws<StateError>([&] { policy->log_std.sum().backward(); }, "Return it from forward");
    average_reference(*reference, 2, [&](int each) { policy_loss(reference, each, 0, false).backward(); });
    policy_loss(policy, rank, 0, false).backward();
    check_sharded_parity(reference, policy, kSumsInAnotherOrder);
  });
}

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

TEST_CASE("a term of the loss made of parameters counts once with replicas, offloading and other shard dims",
          "[loss_terms]") {
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

TEST_CASE("a loss in chunks through a head: refused in the root's unit, right as a unit of its own", "[loss_terms]") {
  const auto loss_in_chunks = [](Policy& policy, int rank) {
    const auto x = policy->body(make_batch(static_cast<uint64_t>(rank), 6, 5)).tanh();
    const auto leaf = x.detach().requires_grad_();
    for (const auto& chunk : leaf.chunk(3)) {
      policy->mean(chunk).pow(2).sum().backward();
    }
    x.backward(leaf.grad());
  };
  run_ranks(2, [&](int rank) {
    Policy reference, policy, in_root;
    fully_shard(in_root->body);
    fully_shard(in_root);
    expect_throws<StateError>([&] { loss_in_chunks(in_root, rank); }, "a unit of its own: fully_shard(part) before");
    fully_shard(policy->body);
    fully_shard(policy->mean);
    fully_shard(policy);
    policy->log_std.set_requires_grad(false);
    reference->log_std.set_requires_grad(false);
    average_reference(*reference, 2, [&](int each) { loss_in_chunks(reference, each); });
    loss_in_chunks(policy, rank);
    check_sharded_parity(reference, policy, kSumsInAnotherOrder);
  });
}

}  // namespace tessera::testing
