// Units whose outputs share memory with each other or with inputs.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>

#include <atomic>
#include <exception>
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

  void expect_refused(int rank) {
    expect_throws<StateError>([&] { input_grad(sharded, rank); }, "shares its memory with another output or an input");
    sharded->zero_grad();
  }
};

/// y and z are [4, 6].
struct Named {
  const char* name;
  Give give;
  std::string_view refused;  // an item a use: 'R' for one that is refused
};

std::vector<Named> ways_to_share() {
  return {
      {"a view of the input",
       [](const at::Tensor& x, const at::Tensor& scale) {
         return Outputs(x.view({4, 6}), x + scale);
       },
       "R=RR=="},
      {"the input and a view of it", [](const at::Tensor& x, const at::Tensor&) { return Outputs(x, x.t().t()); },
       "RRRR=="},
      {"a tensor and a view of it",
       [](const at::Tensor& x, const at::Tensor& scale) {
         const auto y = x + scale;
         return Outputs(y, y.view({6, 4}).view({4, 6}));
       },
       "RRRR=="},
      {"views that overlap",
       [](const at::Tensor& x, const at::Tensor& scale) {
         const auto rows = (x + scale).repeat({2, 1});
         return Outputs(rows.narrow(0, 0, 4), rows.narrow(0, 2, 4));
       },
       "RRRR=="},
      {"views of a part that was changed",
       [](const at::Tensor& x, const at::Tensor& scale) {
         const auto rows = (x + scale).repeat({2, 1});
         rows.narrow(0, 3, 2).add_(scale);
         return Outputs(rows.narrow(0, 0, 4), rows.narrow(0, 2, 4));
       },
       "RRRR=="},
      {"a view with a hook",
       [](const at::Tensor& x, const at::Tensor& scale) {
         const auto y = x * scale;
         auto z = y.view({4, 6});
         z.register_hook([](const at::Tensor& grad) { return grad * 2; });
         return Outputs(y, z);
       },
       "RRRR=="},
      {"chunks of one tensor",
       [](const at::Tensor& x, const at::Tensor& scale) {
         const auto parts = (x * scale).repeat({2, 1}).chunk(2);
         return Outputs(parts[0], parts[1]);
       },
       "RRRR=="},
  };
}

std::vector<Use> ways_to_use() {
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
      [](const at::Tensor& y, const at::Tensor& z, const at::Tensor& x) { return y + z.sin() * x; },
  };
}

}  // namespace

TEST_CASE("outputs that share memory have their gradients, and a change in place of one is refused",
          "[shared_outputs]") {
  const int world_size = GENERATE(1, 2, 3);
  for (const auto& way : ways_to_share()) {
    const auto uses = ways_to_use();
    for (size_t i = 0; i < uses.size(); ++i) {
      INFO(way.name << ", use " << i);
      run_ranks(world_size, [&](int rank) {
        GiverCase one(way.give, uses[i]);
        if (way.refused[i] == 'R') {
          one.expect_refused(rank);
          one.use = uses.back();
        }
        one.expect_equal_gradients(rank, world_size);
      });
    }
  }
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

TEST_CASE("outputs that are DTensors and share memory have their gradients, and a change in place of one is refused",
          "[shared_outputs]") {
  const auto placement = GENERATE(as<Placement>(), Shard(0), Shard(1), Replicate());
  std::atomic<int> compared = 0, refused = 0;
  for (const auto& way : ways_to_share()) {
    const auto uses = ways_to_use();
    for (size_t i = 0; i < uses.size(); ++i) {
      INFO(way.name << ", use " << i);
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
          const auto out = uses[i](y, z, x);
          weighted_loss(is_dtensor(out) ? full_tensor(out) : out).backward();
          return leaf.grad();
        };
        try {
          input_grad(distributed);
        } catch (const std::exception&) {
          return;  // a view whose data had to be moved, or a change that autograd refuses
        }
        at::Tensor grad;
        try {
          grad = input_grad(sharded);
        } catch (const StateError& error) {
          TESSERA_EXPECT(std::string_view(error.what()).find("shares its memory") != std::string_view::npos);
          ++refused;
          return;
        }
        const auto text = describe_difference(full_tensor(grad), input_grad(plain), {});
        TESSERA_CHECK(ExpectationError, text.empty(), "the input's gradient: {}", text);
        TESSERA_EXPECT(sharded->scale.grad().defined() == plain->scale.grad().defined());
        if (plain->scale.grad().defined()) {
          expect_close(full_tensor(sharded->scale.grad()), plain->scale.grad());
        }
        ++compared;
      });
    }
  }
  CHECK(compared >= 2 * 10);
  CHECK(refused >= 2 * 10);
}

}  // namespace tessera::testing
