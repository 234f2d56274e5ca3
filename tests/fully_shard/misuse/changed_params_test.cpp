// Parameters that change between forward and backward: which ranks use them differs, and all are to hear of it.

#include <ATen/TensorOperators.h>
#include <torch/optim/sgd.h>

#include <string>
#include <tuple>

#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

/// Two branches, each a unit, behind a layer of the root.
struct TwoWaysImpl : torch::nn::Module {
  TwoWaysImpl() {
    in = register_module("in", nn::Linear(5, 5));
    left = register_module("left", Block(5, 3));
    right = register_module("right", Block(5, 7));
    fill_parameters(*this, 1);
  }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const auto h = in(x);
    return {left(h), right(h)};
  }
  nn::Linear in{nullptr};
  Block left{nullptr}, right{nullptr};
};
TESSERA_MODULE(TwoWays);

void shard_two_ways(TwoWays& model, const FullyShardOptions& options = {}) {
  fully_shard(model->left, options);
  fully_shard(model->right, options);
  fully_shard(model, options);
}

/// Of even ranks that of one branch, of the others that of the other.
at::Tensor loss_of_one_way(TwoWays& model, int rank) {
  const auto [left, right] = model(make_batch(static_cast<uint64_t>(rank), 3, 5));
  return weighted_loss(rank % 2 == 0 ? left : right);
}

void backward_and_compare(TwoWays& model, TwoWays& reference, int rank, int world_size) {
  model->zero_grad();
  reference->zero_grad();
  average_reference(*reference, world_size, [&](int r) { loss_of_one_way(reference, r).backward(); });
  loss_of_one_way(model, rank).backward();
  check_sharded_parity(reference, model);
}

void add_one(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  for (auto& param : module.parameters()) {
    param.add_(1);
  }
}

constexpr const char* kChanged = "changed in place between forward and backward";

/// A change of the unit `name` by the ranks up to `last_writer`; then a backward in which half of the ranks use it.
void check_all_ranks_throw(TwoWays& model, int rank, const std::string& name, int last_writer) {
  auto loss = loss_of_one_way(model, rank);
  if (rank <= last_writer) {
    add_one(name == "left" ? *model->left : *model->right);
  }
  const bool is_used = rank % 2 == (name == "left" ? 0 : 1);
  const auto backward = [&] { loss.backward(); };
  expect_throws<StateError>(backward, is_used && rank <= last_writer
                                          ? std::string("fully_shard: parameter 'up.weight' of ")
                                          : "'" + name + "', whose parameters were " + kChanged);
}

}  // namespace

TEST_CASE("a unit that changed before backward is an error on every rank, whichever use it", "[changed_params]") {
  const auto* const name = GENERATE("left", "right");
  const int steps = GENERATE(0, 2);  // then its gather is issued ahead of its backward
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16);
  run_ranks(4, [&](int rank) {
    TwoWays model;
    shard_two_ways(model, {.mp_policy = {.param_dtype = dtype}});
    for (int step = 0; step < steps; ++step) {
      loss_of_one_way(model, rank).backward();
    }
    model->zero_grad();
    check_all_ranks_throw(model, rank, name, /*last_writer=*/3);
  });
}

TEST_CASE("a shard that one rank changed before backward is an error on every rank, and the model trains on",
          "[changed_params]") {
  const int steps = GENERATE(0, 2);
  run_ranks(3, [&](int rank) {
    TwoWays model, reference;
    shard_two_ways(model);
    for (int step = 0; step < steps; ++step) {
      backward_and_compare(model, reference, rank, 3);
    }
    const auto rows = to_local(model->left->up->bias.detach()).clone();
    check_all_ranks_throw(model, rank, "left", /*last_writer=*/0);
    {
      const at::NoGradGuard no_grad;
      for (auto& param : model->left->parameters()) {
        if (rank == 0) {
          param.sub_(1);
        }
      }
      expect_close(to_local(model->left->up->bias.detach()), rows);
    }
    backward_and_compare(model, reference, rank, 3);
    backward_and_compare(model, reference, rank, 3);
  });
}

TEST_CASE("a shard that changed before backward is an error with reshard_after_forward = int", "[changed_params]") {
  const int steps = GENERATE(0, 2);
  run_ranks(4, [&](int rank) {
    TwoWays model;
    shard_two_ways(model, {.reshard_after_forward = 2});
    for (int step = 0; step < steps; ++step) {
      loss_of_one_way(model, rank).backward();
    }
    auto loss = loss_of_one_way(model, rank);
    add_one(*model->left);
    expect_throws<StateError>([&] { loss.backward(); }, kChanged);
  });
}

TEST_CASE("one that changed and that no rank's loss uses is none, and the next gather has the new values",
          "[changed_params]") {
  const int last_writer = GENERATE(0, 1);
  run_ranks(2, [&](int rank) {
    TwoWays model, reference;
    shard_two_ways(model);
    for (int step = 0; step < 2; ++step) {
      // From the second step on, gathers are issued ahead of their backward.
      backward_and_compare(model, reference, rank, 2);
    }
    const auto loss_of = [](TwoWays& of, int r) {
      return weighted_loss(std::get<1>(of(make_batch(static_cast<uint64_t>(r), 3, 5))));
    };
    model->zero_grad();
    reference->zero_grad();
    average_reference(*reference, 2, [&](int r) { loss_of(reference, r).backward(); });
    auto loss = loss_of(model, rank);
    if (rank <= last_writer) {
      add_one(*model->left);
    }
    loss.backward();
    expect_close(full_tensor(model->right->up->weight.grad()), reference->right->up->weight.grad());
    if (rank > last_writer) {
      add_one(*model->left);
    }
    add_one(*reference->left);
    backward_and_compare(model, reference, rank, 2);
  });
}

}  // namespace tessera::testing
