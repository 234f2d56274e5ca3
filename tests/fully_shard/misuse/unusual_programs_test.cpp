// Programs that do not train in the usual order: they keep gradients, freeze in between, ask autograd for gradients,
// drop the model, fail half-way.

#include <ATen/SequenceNumber.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/sgd.h>

#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "dtensor/dtensor.h"
#include "fully_shard/events/comm_overrides.h"
#include "fully_shard/forward_method.h"
#include "fully_shard/replicate.h"
#include "testing/expect.h"
#include "testing/fsdp_models/patches.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

void backward_of(Tower& tower, int rank, int step = 0) {
  weighted_loss(tower(rank_batch(rank, step))).backward();
}

/// The same by reference.
struct ProductImpl : torch::nn::Module {
  ProductImpl() { scale = register_parameter("scale", at::full({4}, 2.0)); }
  at::Tensor forward(at::Tensor& a, at::Tensor& b) { return a * b * scale; }
  at::Tensor scale;
};
TESSERA_MODULE(Product);

/// Its forward changes the first input in place and uses both.
struct ScaledProductImpl : torch::nn::Module {
  ScaledProductImpl() { scale = register_parameter("scale", at::full({4}, 2.0)); }
  at::Tensor forward(at::Tensor a, at::Tensor b) {
    a.mul_(scale);
    return a * b;
  }
  at::Tensor scale;
};
TESSERA_MODULE(ScaledProduct);

/// Keeps a part of the loss as a member.
struct AuxiliaryImpl : torch::nn::Module {
  AuxiliaryImpl() { scale = register_parameter("scale", at::full({5}, 2.0)); }
  at::Tensor forward(const at::Tensor& x) {
    auxiliary = (x * scale).sum();
    auto y = x * scale;
    of_output = (y * y).sum();
    return y;
  }
  at::Tensor scale, auxiliary, of_output;
};
TESSERA_MODULE(Auxiliary);

/// Clamps its weight as it goes.
struct ClampedImpl : torch::nn::Module {
  ClampedImpl() { weight = register_parameter("weight", at::full({5}, 2.0)); }
  at::Tensor forward(const at::Tensor& x) {
    if (clamps) {
      const at::NoGradGuard no_grad;
      weight.clamp_(-1, 1);
    }
    return x * weight;
  }
  at::Tensor weight;
  bool clamps = true;
};
TESSERA_MODULE(Clamped);

/// Moves its input along the sign of a gradient that it takes itself.
struct AdversaryImpl : torch::nn::Module {
  AdversaryImpl() {
    in = register_module("in", nn::Linear(5, 5));
    block = register_module("block", Block(5, 3));
    head = register_module("head", nn::Linear(5, 2));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto leaf = x.detach().requires_grad_();
    const auto grad = torch::autograd::grad({encode(leaf).sum()}, {leaf})[0];
    return head(encode(x + 0.1 * grad.sign()));
  }
  /// Through a unit inside, and a layer of its own.
  at::Tensor encode(const at::Tensor& x) {
    return forward_method(
        *this, [this](const at::Tensor& y) { return in(block(y)); }, x);
  }
  nn::Linear in{nullptr};
  Block block{nullptr};
  nn::Linear head{nullptr};
};
TESSERA_MODULE(Adversary);

/// Has its gradient go through its block once more, as a deep equilibrium model.
struct EquilibriumImpl : torch::nn::Module {
  EquilibriumImpl() {
    in = register_module("in", nn::Linear(5, 5));
    block = register_module("block", Block(5, 3));
    head = register_module("head", nn::Linear(5, 2));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto h = head(in(x).tanh());  // whose backward goes on after the hook
    auto z = in(x).tanh();
    const auto leaf = z.detach().requires_grad_();
    const auto again = block(leaf);
    auto out = block(z);
    out.register_hook([=](const at::Tensor& grad) {
      return torch::autograd::grad({again}, {leaf}, {grad}, /*retain_graph=*/true)[0];
    });
    return h + head(out);
  }
  nn::Linear in{nullptr};
  Block block{nullptr};
  nn::Linear head{nullptr};
};
TESSERA_MODULE(Equilibrium);

/// Two, since the engine knows the order of units from the second on.
template <class Model>
void expect_equal_steps(Model& reference, Model& model, int rank) {
  for (int step = 0; step < 2; ++step) {
    model->zero_grad();
    average_reference(*reference, 2, [&](int r) { weighted_loss(reference(rank_batch(r, step))).backward(); });
    weighted_loss(model(rank_batch(rank, step))).backward();
    check_sharded_parity(reference, model);
  }
}

}  // namespace

TEST_CASE("a loss that goes past the outputs of a unit is an error, and what it left is dropped", "[unusual]") {
  run_ranks(2, [](int rank) {
    Auxiliary reference, model;
    fully_shard(model);
    model(rank_batch(rank));
    expect_throws<StateError>([&] { model->auxiliary.backward(); }, "Return it from forward");
    average_reference(*reference, 2, [&](int r) { weighted_loss(reference(rank_batch(r))).backward(); });
    weighted_loss(model(rank_batch(rank))).backward();
    check_sharded_parity(reference, model);
  });
}

TEST_CASE("a loss that goes past the outputs of a unit that is sharded again says what it may be made of",
          "[unusual]") {
  run_ranks(2, [](int rank) {
    Auxiliary reference, model;
    fully_shard(model, {.reshard_after_forward = true});
    model(rank_batch(rank));
    expect_throws<StateError>([&] { model->auxiliary.backward(); },
                              "or the loss is made of a tensor that forward kept as a member or wrote to an argument");
    model->zero_grad();
    average_reference(*reference, 2, [&](int r) { weighted_loss(reference(rank_batch(r))).backward(); });
    weighted_loss(model(rank_batch(rank))).backward();
    check_sharded_parity(reference, model);
  });
}

TEST_CASE("a loss may be made of what forward kept of its only output", "[unusual]") {
  run_ranks(2, [](int rank) {
    Auxiliary reference, model;
    fully_shard(model);
    average_reference(*reference, 2, [&](int r) {
      const auto y = reference(rank_batch(r));
      (weighted_loss(y) + reference->of_output).backward();
      reference(rank_batch(r));
      reference->of_output.backward();
    });
    const auto y = model(rank_batch(rank));
    (weighted_loss(y) + model->of_output).backward();
    model(rank_batch(rank));
    model->of_output.backward();
    check_sharded_parity(reference, model);
  });
}

TEST_CASE("the node of an input that another thread made is left alone", "[unusual]") {
  at::Tensor x;
  std::thread([&] { x = at::ones({3, 5}).requires_grad_() * 2; }).join();
  const auto& node = *x.grad_fn();
  run_ranks(2, [&](int /*rank*/) {
    Auxiliary model;
    fully_shard(model);
    while (at::sequence_number::peek() <= node.sequence_nr()) {
      at::sequence_number::get_and_increment();  // as if the input were the thread's own, and new
    }
    model(x);
    TESSERA_EXPECT(node.pre_hooks().empty());
  });
}

TEST_CASE("a second thread in a running forward is refused, and the forward goes on", "[unusual]") {
  run_ranks(2, [](int rank) {
    auto reference = filled_tower(), tower = sharded_tower();
    std::string refusal;
    const auto enter = [&] {
      try {
        tower(rank_batch(rank));
      } catch (const StateError& error) {
        refusal = error.what();
      }
    };
    auto hook = hook_point(*tower->blocks[1], "test").register_forward_pre_hook([&](HookPoint&, TensorRefs) {
      std::thread(enter).join();
    });
    const auto loss = weighted_loss(tower(rank_batch(rank)));
    expect_equal(refusal,
                 std::string("fully_shard: forward of tessera::testing::TowerImpl was called while another thread runs "
                             "it. Use one thread a rank"));
    hook.remove();
    loss.backward();
    average_reference(*reference, 2, [&](int r) { backward_of(reference, r); });
    check_sharded_parity(reference, tower);
    expect_equal_steps(reference, tower, rank);
  });
}

TEST_CASE("a forward that writes its parameter is an error, and the parameter is as it was", "[unusual]") {
  run_ranks(2, [](int rank) {
    Clamped reference, model;
    fully_shard(model);
    expect_throws<StateError>([&] { model(rank_batch(rank)); }, "parameter 'weight' of");
    reference->clamps = model->clamps = false;
    average_reference(*reference, 2, [&](int r) { weighted_loss(reference(rank_batch(r))).backward(); });
    weighted_loss(model(rank_batch(rank))).backward();
    check_sharded_parity(reference, model);
  });
}

TEST_CASE("a forward may take a gradient through a unit in it", "[unusual]") {
  run_ranks(2, [](int rank) {
    Adversary reference, model;
    fill_parameters(*reference, 1);
    fill_parameters(*model, 1);
    fully_shard(model->block);
    fully_shard(model);
    expect_equal_steps(reference, model, rank);
  });
}

TEST_CASE("a tensor hook may take a gradient through a unit, in the middle of backward", "[unusual]") {
  run_ranks(2, [](int rank) {
    Equilibrium reference, model;
    fill_parameters(*reference, 1);
    fill_parameters(*model, 1);
    fully_shard(model->block);
    fully_shard(model, {.reshard_after_forward = true});
    expect_equal_steps(reference, model, rank);
  });
}

TEST_CASE("gradients that the program keeps, detached, are not written by the next backward", "[unusual]") {
  run_ranks(2, [](int rank) {
    auto tower = sharded_tower();
    backward_of(tower, rank);
    std::vector<at::Tensor> kept, values;
    for (const auto& param : tower->parameters()) {
      kept.push_back(param.grad().detach());
      values.push_back(full_tensor(param.grad()).clone());
    }
    tower->zero_grad();
    backward_of(tower, rank, 1);
    for (size_t i = 0; i < kept.size(); ++i) {
      expect_bit_equal(kept[i], values[i]);
    }
  });
}

TEST_CASE("a parameter that is frozen while its gradient waits for the reduction is named", "[unusual]") {
  run_ranks(2, [](int rank) {
    auto tower = sharded_tower();
    auto& weight = tower->blocks[1]->up->weight;
    fsdp(tower).set_requires_gradient_sync(false);
    backward_of(tower, rank);
    fsdp(tower).set_requires_gradient_sync(true);
    weight.set_requires_grad(false);
    expect_throws<StateError>([&] { backward_of(tower, rank, 1); }, "parameter 'up.weight' of");
    fsdp(tower).reset_iter_state();
    Tower reference;
    fill_parameters(*reference, 1);
    reference->blocks[1]->up->weight.set_requires_grad(false);
    average_reference(*reference, 2, [&](int r) { weighted_loss(reference(rank_batch(r, 1))).backward(); });
    backward_of(tower, rank, 1);
    check_sharded_parity(reference, tower);
  });
}

TEST_CASE("autograd::grad with respect to parameters is refused, to inputs it is not", "[unusual]") {
  const bool replicates = GENERATE(false, true);
  run_ranks(2, [=](int rank) {
    Tower tower;
    fill_parameters(*tower, 1);
    if (replicates) {
      replicate(tower);
    } else {
      shard_tower(tower);
    }
    expect_throws<NotImplementedError>(
        [&] { torch::autograd::grad({weighted_loss(tower(rank_batch(rank)))}, tower->parameters()); },
        "Call backward() and read the parameters' grad()");
    fsdp(tower).reset_iter_state();
    const auto x = rank_batch(rank).requires_grad_();
    const auto grads = torch::autograd::grad({weighted_loss(tower(x))}, {x});
    Tower reference;
    fill_parameters(*reference, 1);
    const auto y = rank_batch(rank).requires_grad_();
    expect_close(grads[0], torch::autograd::grad({weighted_loss(reference(y))}, {y})[0]);
  });
}

TEST_CASE("backward of a model that was destroyed is an error", "[unusual]") {
  run_ranks(2, [](int rank) {
    at::Tensor loss;
    {
      auto tower = sharded_tower();
      loss = weighted_loss(tower(rank_batch(rank)));
    }
    expect_throws<StateError>([&] { loss.backward(); }, "which was destroyed");
  });
}

TEST_CASE("a model that is made in inference mode runs there again and again", "[unusual]") {
  run_ranks(2, [](int rank) {
    const c10::InferenceMode guard;
    Tower reference;
    fill_parameters(*reference, 1);
    auto tower = sharded_tower();
    for (int step = 0; step < 3; ++step) {
      expect_bit_equal(tower(rank_batch(rank, step)), reference(rank_batch(rank, step)));
    }
  });
}

TEST_CASE("a tensor that a unit gets twice and changes in place is one there, too", "[unusual]") {
  run_ranks(2, [](int rank) {
    const auto run = [&](ScaledProduct& module) {
      const auto x = make_batch(static_cast<uint64_t>(rank), 3, 4).requires_grad_();
      auto h = x * 3, same = h;
      const auto loss = module(std::move(h), std::move(same)).sum();
      loss.backward();
      return std::pair(loss.detach(), x.grad());
    };
    ScaledProduct reference, sharded;
    fully_shard(sharded);
    const auto expected = run(reference), actual = run(sharded);
    expect_bit_equal(actual.first, expected.first);
    expect_bit_equal(actual.second, expected.second);
    Product product;
    fully_shard(product);
    auto h = make_batch(static_cast<uint64_t>(rank), 3, 4).requires_grad_() * 3;
    const auto before = h.detach().clone();
    expect_bit_equal(product(h, h), before * before * 2);
  });
}

TEST_CASE("what fails at the end of a forward leaves the next iterations as they would be", "[unusual]") {
  run_ranks(2, [](int rank) {
    auto tower = sharded_tower();
    bool fails = true;
    comm_overrides()->reshard = [&](const UnitCall& call) {
      TESSERA_CHECK(Error, !std::exchange(fails, false), "on purpose");
      call.run();
    };
    expect_throws<Error>([&] { backward_of(tower, rank); }, "on purpose");
    Tower reference;
    fill_parameters(*reference, 1);
    for (int step = 0; step < 2; ++step) {
      for (auto* module : {&reference, &tower}) {
        (*module)->zero_grad();
      }
      average_reference(*reference, 2, [&](int r) { weighted_loss(reference(rank_batch(r, step))).backward(); });
      backward_of(tower, rank, step);
      check_sharded_parity(reference, tower);
      expect_equal(fsdp(tower).memory_stats().acquired, 0u);
    }
    comm_overrides()->reshard = nullptr;
  });
}

class LostWork final : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds /*timeout*/ = kNoTimeout) override { throw CommError("a peer has gone"); }
};

TEST_CASE("memory of an all-gather that failed is not lent again: a peer may still write it", "[unusual]") {
  const bool waits = GENERATE(false, true);
  run_ranks(2, [&](int rank) {
    auto tower = sharded_tower();
    at::Tensor written;
    {
      const auto patch = patch_all_gather(
          [&](const AllGatherFn&, const at::Tensor& output, const at::Tensor&, const ProcessGroupPtr&) {
            written = output;
            return Pending(c10::make_intrusive<LostWork>());
          });
      auto handle = fsdp(tower->blocks[0]).unshard(/*async_op=*/true);
      if (waits) {
        expect_throws<CommError>([&] { handle.wait(); }, "a peer has gone");
      }
      fsdp(tower->blocks[0]).reshard();
    }
    TESSERA_EXPECT(written.numel() > 0 && written.storage().nbytes() == written.nbytes());
    backward_of(tower, rank);
    TESSERA_EXPECT(written.storage().nbytes() == written.nbytes());
  });
}

TEST_CASE("memory of a reduction that failed is not lent again: a peer may still read and write it", "[unusual]") {
  run_ranks(2, [&](int rank) {
    auto tower = sharded_tower();
    std::vector<at::Tensor> lost;
    {
      const auto patch = patch_reduce_scatter([&](const ReduceScatterFn&, const at::Tensor& output,
                                                  const at::Tensor& input, ReduceOp, const ProcessGroupPtr&) {
        input.fill_(7);
        output.fill_(8);
        lost = {input, output};
        return Pending(c10::make_intrusive<LostWork>());
      });
      expect_throws<CommError>([&] { backward_of(tower, rank); }, "a peer has gone");
    }
    const auto expect_kept = [&] {
      for (size_t i = 0; i < lost.size(); ++i) {
        TESSERA_EXPECT(lost[i].storage().nbytes() >= lost[i].nbytes());
        expect_bit_equal(lost[i], at::full_like(lost[i], 7 + static_cast<int>(i)));
      }
    };
    expect_equal(lost.size(), size_t{2});
    expect_kept();
    Tower reference;
    fill_parameters(*reference, 1);
    for (int step = 0; step < 2; ++step) {
      reference->zero_grad();
      tower->zero_grad();
      average_reference(*reference, 2, [&](int r) { weighted_loss(reference(rank_batch(r, step))).backward(); });
      backward_of(tower, rank, step);
      check_sharded_parity(reference, tower);
      expect_kept();
    }
  });
}

TEST_CASE("when a rank has failed in backward, the others' models are as before, and whatever they do says why",
          "[unusual]") {
  const bool resets = GENERATE(false, true);
  const auto train = [&](int rank) {
    Tower sharded;
    fill_parameters(*sharded, 1);
    shard_tower(sharded);
    if (rank == 1) {
      sharded->blocks[1]->up->weight.register_hook([](const at::Tensor& grad) {
        TESSERA_CHECK(Error, !grad.defined(), "on purpose");
        return grad;
      });
    }
    const auto step = [&] { backward_of(sharded, rank); };
    if (rank == 1) {
      step();
      return;
    }
    for (int attempt = 0; attempt < 3; ++attempt) {
      expect_throws<CommError>(step, "on purpose");
      if (resets) {
        fsdp(sharded).reset_iter_state();
        expect_equal(fsdp(sharded).memory_stats().acquired, 0u);
        for (const auto& param : sharded->parameters()) {
          TESSERA_EXPECT(is_dtensor(param) && !param.grad().defined());
        }
      }
    }
  };
  expect_throws<Error>([&] { run_ranks(3, train); }, "rank 1: on purpose");
}

}  // namespace tessera::testing
