// Units that change their inputs in place, which the caller uses afterwards.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>

#include <functional>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// Changes its input before it computes with it.
struct ChangerImpl : torch::nn::Module {
  using Change = std::function<void(at::Tensor& x, const at::Tensor& weight)>;

  explicit ChangerImpl(Change change) : change(std::move(change)) { fc = register_module("fc", nn::Linear(7, 7)); }
  at::Tensor forward(at::Tensor x) {
    change(x, fc->weight);
    return fc(x);
  }

  Change change;
  nn::Linear fc{nullptr};
};
TESSERA_MODULE(Changer);

struct ChangerNetImpl : torch::nn::Module {
  using Join = std::function<at::Tensor(Changer& changer, const at::Tensor& x)>;

  ChangerNetImpl(const ChangerImpl::Change& change, Join join) : join(std::move(join)) {
    in = register_module("in", nn::Linear(5, 7));
    changer = register_module("changer", Changer(change));
    out = register_module("out", nn::Linear(7, 3));
  }
  at::Tensor forward(at::Tensor x) { return out(join(changer, in(x))); }

  Join join;
  nn::Linear in{nullptr}, out{nullptr};
  Changer changer{nullptr};
};
TESSERA_MODULE(ChangerNet);

void relu(at::Tensor& x, const at::Tensor& /*weight*/) {
  x.relu_();
}

at::Tensor input_too(Changer& changer, const at::Tensor& h) {
  const auto y = changer(h);
  return y + h;
}

struct ChangerNetPair {
  ChangerNet reference, sharded;

  ChangerNetPair(const ChangerImpl::Change& change, const ChangerNetImpl::Join& join)
      : reference(change, join), sharded(change, join) {
    fill_parameters(*reference, 1);
    fill_parameters(*sharded, 1);
    fully_shard(sharded->changer);
    fully_shard(sharded, {.reshard_after_forward = true});
  }

  void expect_equal_gradients(int rank, int world_size) {
    const auto loss_of = [](ChangerNet& net, int r) {
      return weighted_loss(net(make_batch(static_cast<uint64_t>(r), 3, 5)));
    };
    for (int step = 0; step < 2; ++step) {
      sharded->zero_grad();
      average_reference(*reference, world_size, [&](int r) { loss_of(reference, r).backward(); });
      auto loss = loss_of(sharded, rank);
      expect_bit_equal(loss.detach(), loss_of(reference, rank).detach());
      loss.backward();
      check_sharded_parity(reference, sharded, kExact);
    }
    expect_equal(fsdp(sharded->changer).unsharded_bytes(), 0u);
  }
};

/// Of the parameters, and of the input of each rank, which `input_grad(module, rank)` gives.
template <class Module, class InputGrad>
void expect_equal_input_gradients(Module& reference, Module& sharded, int rank, const InputGrad& input_grad) {
  at::Tensor expected;
  average_reference(reference, 2, [&](int r) {
    const auto grad = input_grad(reference, r);
    expected = r == rank ? grad : expected;
  });
  expect_bit_equal(input_grad(sharded, rank), expected);
  check_sharded_parity(reference, sharded, kExact);
}

}  // namespace

TEST_CASE("an input that a unit changes in place has the gradient of what it became", "[changed_inputs]") {
  const int world_size = GENERATE(1, 2, 3);
  const auto change = GENERATE(
      as<ChangerImpl::Change>(), relu,
      [](at::Tensor& x, const at::Tensor& weight) {
        x.mul_(weight[0]);  // whose gradient needs the unit's parameters in backward
        x.relu_();
      },
      [](at::Tensor& x, const at::Tensor&) {
        const at::NoGradGuard no_grad;
        x.add_(1);
      });
  const auto join = GENERATE(
      as<ChangerNetImpl::Join>(), input_too,
      [](Changer& changer, const at::Tensor& h) {
        changer(h);
        return h;
      },
      [](Changer& changer, const at::Tensor& h) { return changer(h); });
  run_ranks(world_size, [&](int rank) { ChangerNetPair(change, join).expect_equal_gradients(rank, world_size); });
}

TEST_CASE("hooks on an input that a unit changes fire where the input was when they were set", "[changed_inputs]") {
  run_ranks(2, [](int rank) {
    const auto seen = std::make_shared<std::vector<at::Tensor>>();
    const auto watch = [seen](const at::Tensor& h, size_t hook) {
      h.register_hook([seen, hook](const at::Tensor& grad) { seen->at(hook) = grad.clone(); });
    };
    const auto join = [watch](Changer& changer, const at::Tensor& h) {
      watch(h, 0);
      const auto y = changer(h);
      watch(h, 1);
      watch(h, 2);
      return y + h * 3;
    };
    const auto twice = [](at::Tensor& x, const at::Tensor&) { x.mul_(2); };
    ChangerNetPair pair(twice, join);
    const auto grads = [&](ChangerNet& net) {
      seen->assign(3, at::Tensor());
      weighted_loss(net(make_batch(static_cast<uint64_t>(rank), 3, 5))).backward();
      return *seen;
    };
    const auto expected = grads(pair.reference), actual = grads(pair.sharded);
    for (size_t hook = 0; hook < 3; ++hook) {
      expect_bit_equal(actual[hook], expected[hook]);
    }
    TESSERA_EXPECT(!expected[0].equal(expected[1]) && expected[1].equal(expected[2]));
  });
}

TEST_CASE("an input that the outer unit passes on is changed for the caller of both", "[changed_inputs]") {
  run_ranks(2, [](int rank) {
    struct OuterImpl : torch::nn::Module {
      OuterImpl() {
        changer = register_module("changer", Changer(relu));
        out = register_module("out", nn::Linear(7, 7));
      }
      at::Tensor forward(at::Tensor x) { return out(input_too(changer, x)); }
      Changer changer{nullptr};
      nn::Linear out{nullptr};
    };
    const auto reference = std::make_shared<Hooked<OuterImpl>>(), sharded = std::make_shared<Hooked<OuterImpl>>();
    fill_parameters(*reference, 1);
    fill_parameters(*sharded, 1);
    fully_shard(sharded->changer);
    fully_shard(*sharded);
    const auto input_grad = [](Hooked<OuterImpl>& net, int r) {
      const auto leaf = make_batch(static_cast<uint64_t>(r), 3, 7).requires_grad_();
      const auto x = leaf * 2;
      const auto y = net.call(x);
      weighted_loss(y * x).backward();
      return leaf.grad();
    };
    expect_equal_input_gradients(*reference, *sharded, rank, input_grad);
  });
}

TEST_CASE("an input that a unit returns is the caller's tensor, which may change later", "[changed_inputs]") {
  const bool changes = GENERATE(false, true);
  run_ranks(2, [=](int rank) {
    struct PasserImpl : torch::nn::Module {
      explicit PasserImpl(bool changes) : changes(changes) { shift = register_parameter("shift", at::ones({7})); }
      std::tuple<at::Tensor, at::Tensor> forward(at::Tensor x) {
        if (changes) {
          x.add_(shift);
        }
        return {x * 2 + shift, x};
      }
      bool changes;
      at::Tensor shift;
    };
    using Passer = Hooked<PasserImpl>;
    const auto reference = std::make_shared<Passer>(changes), sharded = std::make_shared<Passer>(changes);
    fill_parameters(*reference, 1);
    fill_parameters(*sharded, 1);
    fully_shard(*sharded);
    const auto input_grad = [](Passer& module, int r) {
      const auto leaf = make_batch(static_cast<uint64_t>(r), 3, 7).requires_grad_();
      auto x = leaf * 2;
      const auto before = x * 5;
      const auto [y, same] = module.call(x);
      TESSERA_EXPECT(same.is_same(x));
      at::Tensor seen;  // by a hook on what x is before the last change
      x.register_hook([&](const at::Tensor& grad) { seen = grad.clone(); });
      x.mul_(3);
      weighted_loss(y + same + before).backward();
      return at::stack({leaf.grad(), seen});
    };
    expect_equal_input_gradients(*reference, *sharded, rank, input_grad);
  });
}

TEST_CASE("an input without a gradient gets one from the unit that changes it", "[changed_inputs]") {
  run_ranks(2, [](int rank) {
    const auto scale = [](at::Tensor& x, const at::Tensor& weight) { x.mul_(weight[0]); };
    Changer reference(scale), sharded(scale);
    fill_parameters(*reference, 1);
    fill_parameters(*sharded, 1);
    fully_shard(sharded);
    const auto backward = [](Changer& module, int r, bool uses_output) {
      const auto x = make_batch(static_cast<uint64_t>(r), 3, 7);
      const auto y = module(x);
      weighted_loss(uses_output ? y + x : x).backward();
    };
    for (const bool uses_output : {false, true}) {
      sharded->zero_grad();
      average_reference(*reference, 2, [&](int r) { backward(reference, r, uses_output); });
      backward(sharded, rank, uses_output);
      check_sharded_parity(reference, sharded, kExact);
    }
  });
}

TEST_CASE("a change in place that cannot be the caller's too is refused, and the model stays usable",
          "[changed_inputs]") {
  run_ranks(2, [](int rank) {
    bool detaches = false;
    const auto change = [&](at::Tensor& x, const at::Tensor&) {
      if (detaches) {
        x.detach_();
      } else {
        x.relu_();
      }
    };
    ChangerNetPair pair(change, input_too);
    const auto refused = [&](const ChangerNetImpl::Join& join, std::string_view why) {
      const auto usual = std::exchange(pair.sharded->join, join);
      expect_throws<StateError>([&] { pair.sharded(make_batch(1, 3, 5)); }, "forward of the unit 'changer'");
      expect_throws<StateError>([&] { pair.sharded(make_batch(1, 3, 5)); }, why);
      pair.sharded->join = usual;
      pair.expect_equal_gradients(rank, 2);
    };
    refused([](Changer& changer, const at::Tensor& h) { return changer(h.view({-1}).view({3, 7})); }, "a view of");
    refused(
        [](Changer& changer, const at::Tensor&) {
          const auto leaf = make_batch(1, 3, 7).requires_grad_();
          return changer(leaf) + leaf;
        },
        "a leaf");
    refused(
        [](Changer& changer, const at::Tensor& h) {
          h.retain_grad();
          return changer(h);
        },
        "retain its gradient");
    detaches = true;
    expect_throws<StateError>([&] { pair.sharded(make_batch(1, 3, 5)); }, "detached there");
  });
}

}  // namespace tessera::testing
