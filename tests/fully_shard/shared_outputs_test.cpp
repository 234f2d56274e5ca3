// Units whose outputs share memory with each other or with inputs, and are changed in place by their caller.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string_view>
#include <tuple>

#include "device_mesh/device_mesh.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"
#include "parallel/distribute_module.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using Outputs = std::tuple<at::Tensor, at::Tensor>;
using Give = std::function<Outputs(const at::Tensor& x, const at::Tensor& scale)>;
/// What the caller makes of (y, z) and the input x: its loss.
using Use = std::function<at::Tensor(at::Tensor y, at::Tensor z, at::Tensor x)>;

struct GiverImpl : torch::nn::Module {
  explicit GiverImpl(Give give) : give(std::move(give)) { scale = register_parameter("scale", at::ones({6})); }
  Outputs forward(at::Tensor x) { return give(x, scale); }

  Give give;
  at::Tensor scale;
};
TESSERA_MODULE(Giver);

/// One unit, which the same one-process module is compared with.
struct GiverCase {
  Giver reference, sharded;
  Use use;

  GiverCase(const Give& give, Use use) : reference(give), sharded(give), use(std::move(use)) {
    fill_parameters(*reference, 1);
    fill_parameters(*sharded, 1);
    fully_shard(sharded);
  }

  at::Tensor input_grad(Giver& giver, int rank) const {
    const auto leaf = make_batch(static_cast<uint64_t>(rank), 4, 6).requires_grad_();
    const auto x = leaf * 2;
    const auto [y, z] = giver(x);
    weighted_loss(use(y, z, x)).backward();
    return leaf.grad();
  }

  void expect_equal_gradients(int rank, int world_size) {
    at::Tensor expected;
    average_reference(*reference, world_size, [&](int r) {
      const auto grad = input_grad(reference, r);
      expected = r == rank ? grad : expected;
    });
    const auto text = describe_difference(input_grad(sharded, rank), expected, {});
    TESSERA_CHECK(ExpectationError, text.empty(), "the input's gradient: {}", text);
    check_sharded_parity(reference, sharded, {});
  }

  void expect_refused(int rank, std::string_view why) {
    expect_throws<StateError>([&] { input_grad(sharded, rank); }, why);
    sharded->zero_grad();
  }
};

/// y and z are [4, 6].
struct Named {
  const char* name;
  Give give;
};

std::vector<Named> ways_to_share() {
  return {
      {"a view of the input",
       [](const at::Tensor& x, const at::Tensor& scale) {
         return Outputs(x.view({4, 6}), x + scale);
       }},
      {"the input and a view of it", [](const at::Tensor& x, const at::Tensor&) { return Outputs(x, x.t().t()); }},
      {"a view of the input that the unit changes",
       [](const at::Tensor& x, const at::Tensor& scale) {
         x.add_(scale);
         return Outputs(x.view({4, 6}), x);
       }},
      {"a tensor and a view of it",
       [](const at::Tensor& x, const at::Tensor& scale) {
         const auto y = x + scale;
         return Outputs(y, y.view({6, 4}).view({4, 6}));
       }},
      {"views that overlap",
       [](const at::Tensor& x, const at::Tensor& scale) {
         const auto rows = (x + scale).repeat({2, 1});
         return Outputs(rows.narrow(0, 0, 4), rows.narrow(0, 2, 4));
       }},
      {"views of a part that was changed",
       [](const at::Tensor& x, const at::Tensor& scale) {
         const auto rows = (x + scale).repeat({2, 1});
         rows.narrow(0, 3, 2).add_(scale);
         return Outputs(rows.narrow(0, 0, 4), rows.narrow(0, 2, 4));
       }},
  };
}

std::vector<Use> ways_to_change() {
  return {
      [](at::Tensor y, const at::Tensor& z, const at::Tensor& x) {
        y.mul_(3);
        return y + z + x;
      },
      [](const at::Tensor& y, at::Tensor z, const at::Tensor& x) {
        z.sin_();
        return y * 2 + x;
      },
      [](at::Tensor y, at::Tensor z, at::Tensor x) {
        x.mul_(2);
        z.add_(x);
        y.narrow(1, 1, 3).mul_(5);
        return y + z + x;
      },
      [](const at::Tensor& y, const at::Tensor& z, const at::Tensor&) {
        const at::NoGradGuard no_grad;
        y.mul_(2);
        const at::AutoGradMode grad(true);
        return y + z;
      },
      [](const at::Tensor& y, const at::Tensor&, const at::Tensor&) { return y * 2; },
  };
}

}  // namespace

TEST_CASE("outputs that share memory may be changed in place", "[shared_outputs]") {
  const int world_size = GENERATE(1, 2, 3);
  for (const auto& way : ways_to_share()) {
    INFO(way.name);
    for (const auto& use : ways_to_change()) {
      run_ranks(world_size, [&](int rank) { GiverCase(way.give, use).expect_equal_gradients(rank, world_size); });
    }
  }
}

TEST_CASE("outputs that cannot have one history are not to be changed", "[shared_outputs]") {
  run_ranks(2, [](int rank) {
    const Use changes = [](at::Tensor y, const at::Tensor& z, const at::Tensor&) {
      y.mul_(3);
      return y + z;
    };
    const Use keeps = [](const at::Tensor& y, const at::Tensor& z, const at::Tensor& x) { return y + z * x; };
    const Give hooked = [](const at::Tensor& x, const at::Tensor& scale) {
      const auto y = x * scale;
      auto z = y.view({4, 6});
      z.register_hook([](const at::Tensor& grad) { return grad * 2; });
      return Outputs(y, z);
    };
    const Give parts = [](const at::Tensor& x, const at::Tensor& scale) {
      const auto rows = (x * scale).repeat({2, 1});
      return Outputs(rows.narrow(0, 0, 4), rows.chunk(2)[0]);
    };
    for (const auto& give : {hooked, parts}) {
      GiverCase shared(give, changes);
      shared.expect_refused(rank, "shares its memory with another output or an input");
      shared.use = keeps;
      shared.expect_equal_gradients(rank, 2);
    }
  });
}

TEST_CASE("parts of one tensor, as of chunk(), have a node each", "[shared_outputs]") {
  run_ranks(2, [](int rank) {
    const Give give = [](const at::Tensor& x, const at::Tensor& scale) {
      const auto parts = (x * scale).repeat({2, 1}).chunk(2);
      return Outputs(parts[0], parts[1]);
    };
    const Use use = [](const at::Tensor& y, const at::Tensor& z, const at::Tensor&) { return y + z.sin(); };
    GiverCase(give, use).expect_equal_gradients(rank, 2);
  });
}

TEST_CASE("a view that enters a unit and leaves it is not to be changed", "[shared_outputs]") {
  run_ranks(2, [](int) {
    Giver giver([](const at::Tensor& x, const at::Tensor& scale) { return Outputs(x, x * scale); });
    fill_parameters(*giver, 1);
    fully_shard(giver);
    const auto x = make_batch(1, 8, 6).requires_grad_() * 2;
    const auto backward = [&](bool changes) {
      const auto [y, z] = giver(x.narrow(0, 0, 4));
      if (changes) {
        y.mul_(2);
      }
      weighted_loss(y + z).backward();
    };
    backward(false);
    expect_throws<StateError>([&] { backward(true); }, "Change a clone() of the output");
  });
}

TEST_CASE("hooks of an output that others are computed from are set in forward", "[shared_outputs]") {
  const auto give = [](const at::Tensor& x, const at::Tensor& scale) {
    const auto features = (x * scale).tanh();
    return Outputs{features, (features * scale).sin()};
  };
  run_ranks(2, [&](int rank) {
    const auto features_grad = [&](Giver& giver, bool within) {
      at::Tensor features;
      giver->give = [&](const at::Tensor& x, const at::Tensor& scale) {
        features = (x * scale).tanh();
        if (within) {
          features.retain_grad();
        }
        return Outputs{features, (features * scale).sin()};
      };
      const auto [z, y] = giver(make_batch(static_cast<uint64_t>(rank), 4, 6));
      if (!within) {
        z.retain_grad();
      }
      weighted_loss(y + z).backward();
      return features.grad();
    };
    GiverCase one(give, [](at::Tensor y, at::Tensor z, at::Tensor) { return y + z; });
    expect_close(features_grad(one.sharded, true), features_grad(one.reference, true));
    expect_throws<StateError>([&] { features_grad(one.sharded, false); }, "within forward, on the tensor");
    one.sharded->give = give;
    int seen = 0;
    const auto backward = [&](const auto& hooked, const auto& loss_of) {
      one.sharded->zero_grad();
      const auto outputs = one.sharded(make_batch(1, 4, 6));
      hooked(outputs).register_hook([&](const at::Tensor& grad) {
        ++seen;
        return grad * 2;
      });
      weighted_loss(loss_of(outputs)).backward();
    };
    const auto features = [](const Outputs& outputs) { return std::get<0>(outputs); };
    const auto logits = [](const Outputs& outputs) { return std::get<1>(outputs); };
    const auto both = [](const Outputs& outputs) { return std::get<0>(outputs) + std::get<1>(outputs); };
    expect_throws<StateError>([&] { backward(features, both); }, "has a tensor hook");
    expect_throws<StateError>([&] { backward(features, [&](const Outputs& outputs) { return logits(outputs) * 2; }); },
                              "has a tensor hook");
    seen = 0;
    backward(features, features);  // all of its gradient
    backward(logits, both);        // from which nothing is computed
    expect_equal(seen, 2);
    one.sharded->give = [](const at::Tensor& x, const at::Tensor& scale) {
      const auto parts = (x * scale).chunk(2, 1);
      return Outputs{parts[0].tanh(), parts[1].sin() * parts[1]};
    };
    backward(features, both);
    expect_equal(seen, 3);
  });
}

TEST_CASE("outputs that are DTensors and share memory may be changed in place where DTensors may", "[shared_outputs]") {
  const auto placement = GENERATE(as<Placement>(), Shard(0), Shard(1), Replicate());
  std::atomic<int> compared = 0;
  for (const auto& way : ways_to_share()) {
    INFO(way.name);
    for (const auto& use : ways_to_change()) {
      run_ranks(2, [&](int) {
        const auto mesh = init_device_mesh(at::kCPU, {1, 2}, {"dp", "tp"});
        Giver plain(way.give), distributed(way.give), sharded(way.give);
        for (auto* giver : {&plain, &distributed, &sharded}) {
          fill_parameters(**giver, 1);
        }
        distribute_module(distributed, mesh["tp"]);
        distribute_module(sharded, mesh["tp"]);
        fully_shard(sharded, {.mesh = mesh["dp"]});
        const auto batch = make_batch(1, 4, 6);
        const auto input_grad = [&](Giver& giver) {
          const auto leaf = (&giver == &plain ? batch.clone() : distribute_tensor(batch, mesh["tp"], {placement}));
          const auto x = leaf.requires_grad_() * 2;
          const auto [y, z] = giver(x);
          const auto out = use(y, z, x);
          weighted_loss(is_dtensor(out) ? full_tensor(out) : out).backward();
          return leaf.grad();
        };
        try {
          input_grad(distributed);
        } catch (const Error&) {
          return;  // a view whose data had to be moved
        }
        const auto text = describe_difference(full_tensor(input_grad(sharded)), input_grad(plain), {});
        TESSERA_CHECK(ExpectationError, text.empty(), "the input's gradient: {}", text);
        TESSERA_EXPECT(sharded->scale.grad().defined() == plain->scale.grad().defined());
        if (plain->scale.grad().defined()) {
          expect_close(full_tensor(sharded->scale.grad()), plain->scale.grad());
        }
        ++compared;
      });
    }
  }
  CHECK(compared >= 2 * 20);
}

}  // namespace tessera::testing
