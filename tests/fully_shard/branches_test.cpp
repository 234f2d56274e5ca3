// Units with several ways through them, of which a loss uses some, and ranks perhaps others.

#include <ATen/TensorOperators.h>
#include <torch/optim/sgd.h>

#include <tuple>

#include "activation_checkpoint/checkpoint.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/fully_shard/models/own_product.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

/// Three outputs, behind the last of which a tensor hook doubles gradients.
struct ThreeOutputsImpl : torch::nn::Module {
  ThreeOutputsImpl() {
    for (const char* name : {"a", "b", "c"}) {
      register_parameter(name, at::full({4}, 2.0));
    }
  }
  std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& y) {
    const auto scales = named_parameters();
    auto last = y * scales["c"];
    last.register_hook([](const at::Tensor& grad) { return grad * 2; });
    return {x * scales["a"], OwnProduct::apply(y, scales["b"]), last};
  }
};
TESSERA_MODULE(ThreeOutputs);

/// Two branches, each a unit, behind a layer of the root.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    in = register_module("in", nn::Linear(5, 5));
    left = register_module("left", Block(5, 3));
    right = register_module("right", Block(5, 7));
  }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const auto h = in(x);
    return {left(h), right(detaches_right ? h.detach() : h)};
  }
  nn::Linear in{nullptr};
  Block left{nullptr}, right{nullptr};
  bool detaches_right = false;
};
TESSERA_MODULE(Branches);

using Loss = at::Tensor (*)(Branches& model, int rank, int step);

/// Of rank 0 that of one branch, of the others that of the other.
at::Tensor loss_of_a_branch(Branches& model, int rank, int step) {
  const auto [left, right] = model(rank_batch(rank, step));
  return weighted_loss(rank == 0 ? left : right);
}

struct BranchesPair {
  Branches reference, branches;

  BranchesPair() {
    fill_parameters(*reference, 1);
    fill_parameters(*branches, 1);
  }
  void shard() {
    fully_shard(branches->left);
    fully_shard(branches->right);
    fully_shard(branches);
  }
  void train(int rank, int steps, Loss loss) {
    for (int step = 0; step < steps; ++step) {
      branches->zero_grad();
      average_reference(*reference, 2, [&](int r) { loss(reference, r, step).backward(); });
      loss(branches, rank, step).backward();
      check_sharded_parity(reference, branches);
    }
  }
};

/// Two inputs, each with a layer.
struct JoinImpl : torch::nn::Module {
  JoinImpl() {
    a = register_module("a", nn::Linear(5, 5));
    b = register_module("b", nn::Linear(5, 5));
  }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& y) { return {a(x), b(y)}; }
  nn::Linear a{nullptr}, b{nullptr};
};
TESSERA_MODULE(Join);

/// Three trees of units, with nothing around them.
struct Towers : torch::nn::Module {
  Towers() {
    text = register_module("text", Block(5, 3));
    image = register_module("image", Block(5, 3));
    join = register_module("join", Join());
    fill_parameters(*this, 1);
  }
  at::Tensor loss(int rank, int step) {
    const auto [a, b] = join(text(rank_batch(rank, step)), image(rank_batch(rank, step + 100)));
    return weighted_loss(rank == 0 ? a : b);
  }
  Block text{nullptr}, image{nullptr};
  Join join{nullptr};
};

}  // namespace

TEST_CASE("what lies behind an output or an input that the loss does not use is not computed", "[branches]") {
  run_ranks(2, [](int rank) {
    ThreeOutputs reference, sharded;
    fully_shard(sharded);
    const auto backward = [&](ThreeOutputs& model, int r) {
      const auto x = (rank_batch(r) * 1).narrow(1, 0, 4), leaf = at::full({3, 4}, 1.5).requires_grad_();
      const auto y = OwnProduct::apply(leaf, at::ones({4}).requires_grad_());
      weighted_loss(std::get<0>(model(x, y))).backward();
      TESSERA_EXPECT(!leaf.grad().defined());
    };
    average_reference(*reference, 2, [&](int r) { backward(reference, r); });
    for (int i = 0; i < 2; ++i) {
      sharded->zero_grad();
      backward(sharded, rank);
      const auto params = sharded->named_parameters();
      TESSERA_EXPECT(params["a"].grad().defined() && !params["b"].grad().defined() && !params["c"].grad().defined());
      check_sharded_parity(reference, sharded);
    }
  });
}

TEST_CASE("ranks whose losses use different outputs of a unit train together, from the first step on", "[branches]") {
  run_ranks(2, [](int rank) {
    BranchesPair pair;
    pair.shard();
    pair.train(rank, 3, loss_of_a_branch);
  });
}

TEST_CASE("ranks that use different trees of units behind one output train together", "[branches]") {
  run_ranks(2, [](int rank) {
    Towers reference, towers;
    fully_shard(towers.text);
    fully_shard(towers.image);
    fully_shard(towers.join);
    for (int step = 0; step < 3; ++step) {
      towers.zero_grad();
      average_reference(reference, 2, [&](int r) { reference.loss(r, step).backward(); });
      towers.loss(rank, step).backward();
      check_sharded_parity(reference, towers);
    }
  });
}

TEST_CASE("ranks that use different outputs train together with activation checkpointing", "[branches]") {
  const bool is_whole = GENERATE(false, true);
  run_ranks(2, [=](int rank) {
    BranchesPair pair;
    if (is_whole) {
      checkpoint_module(pair.branches);
    } else {
      checkpoint_module(pair.branches->left);
      checkpoint_module(pair.branches->right);
    }
    pair.shard();
    pair.train(rank, 3, loss_of_a_branch);
  });
}

TEST_CASE("ranks that use different outputs train together after a first step with one branch", "[branches]") {
  run_ranks(2, [](int rank) {
    BranchesPair pair;
    pair.shard();
    const auto loss = [](Branches& model, int r, int step) {
      for (const auto& param : model->right->parameters()) {
        param.set_requires_grad(step > 1);
      }
      model->detaches_right = step <= 1;
      const auto [left, right] = model(rank_batch(r, step));
      return weighted_loss(r == 0 || step <= 1 ? left : right);
    };
    pair.train(rank, 4, loss);
  });
}

TEST_CASE("a branch may be stepped on before the other's backward", "[branches]") {
  run_ranks(2, [](int rank) {
    BranchesPair pair;
    pair.shard();
    auto &reference = pair.reference, &branches = pair.branches;
    const auto left_first = [](Branches& model, int r) {
      const auto [left, right] = model(rank_batch(r));
      weighted_loss(left).backward({}, /*retain_graph=*/true);
      return right;
    };
    average_reference(*reference, 2, [&](int r) { left_first(reference, r); });
    const auto right = left_first(branches, rank);
    check_sharded_parity(reference, branches);
    torch::optim::SGD(branches->left->parameters(), 0.1).step();
    branches->zero_grad();
    weighted_loss(right).backward();
    // It is of the values before the step, which the reference still has.
    average_reference(*reference, 2, [&](int r) { weighted_loss(std::get<1>(reference(rank_batch(r)))).backward(); });
    expect_close(branches->right->up->weight.grad(), reference->right->up->weight.grad());
  });
}

}  // namespace tessera::testing
