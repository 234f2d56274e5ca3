// Units that change their inputs in place.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <exception>
#include <functional>
#include <string_view>
#include <utility>

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
  using Join = std::function<at::Tensor(Changer& changer, at::Tensor h)>;

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

void scale(at::Tensor& x, const at::Tensor& weight) {
  x.mul_(weight[0]);  // whose gradient needs the unit's parameters in backward
}

void add_without_history(at::Tensor& x, const at::Tensor& /*weight*/) {
  const at::NoGradGuard no_grad;
  x.add_(1);
}

at::Tensor keep_input(Changer& changer, const at::Tensor& h) {
  const auto y = changer(h);
  return y + h;
}

at::Tensor give_input_away(Changer& changer, at::Tensor h) {
  return changer(std::move(h));
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

}  // namespace

TEST_CASE("a unit may change its only input in place, which its caller may use", "[changed_inputs]") {
  const int world_size = GENERATE(1, 2, 3);
  const auto change = GENERATE(as<ChangerImpl::Change>(), relu, scale);
  const auto join = GENERATE(as<ChangerNetImpl::Join>(), keep_input, give_input_away);
  run_ranks(world_size, [&](int rank) { ChangerNetPair(change, join).expect_equal_gradients(rank, world_size); });
}

TEST_CASE("a unit may change the values of an input without grad mode", "[changed_inputs]") {
  const int world_size = GENERATE(1, 2, 3);
  const auto join = GENERATE(as<ChangerNetImpl::Join>(), keep_input, give_input_away);
  run_ranks(world_size,
            [&](int rank) { ChangerNetPair(add_without_history, join).expect_equal_gradients(rank, world_size); });
}

TEST_CASE("a change in place that the caller's tensor would miss is refused, and the model stays usable",
          "[changed_inputs]") {
  run_ranks(2, [](int rank) {
    ChangerImpl::Change change = relu;
    ChangerNetPair pair([&](at::Tensor& x, const at::Tensor& weight) { change(x, weight); }, give_input_away);
    const auto refused = [&](const ChangerNetImpl::Join& join, std::string_view why) {
      const auto usual = std::exchange(pair.sharded->join, join);
      pair.sharded->zero_grad();
      expect_throws<std::exception>([&] { weighted_loss(pair.sharded(make_batch(1, 3, 5))).backward(); }, why);
      pair.sharded->join = usual;
      pair.sharded->zero_grad();
      pair.expect_equal_gradients(rank, 2);
    };
    constexpr auto kWhy = "changed an input of sizes [3, 7] in place, which its caller still has";
    for (const auto& other : {ChangerImpl::Change(relu), ChangerImpl::Change(scale)}) {
      change = other;
      refused([](Changer& changer, const at::Tensor& h) { return changer(h.view({-1}).view({3, 7})); }, kWhy);
      refused(
          [](Changer& changer, const at::Tensor& h) {
            const auto used = h * 2;
            return changer(h) + used;
          },
          kWhy);
      refused(
          [](Changer& changer, const at::Tensor& h) {
            h.retain_grad();
            return changer(h);
          },
          kWhy);
      refused(
          [](Changer& changer, const at::Tensor&) {
            const auto leaf = make_batch(1, 3, 7).requires_grad_();
            return changer(leaf) + leaf;
          },
          kWhy);
    }
    refused(
        [](Changer& changer, const at::Tensor& h) {
          changer(h);
          return h;
        },
        "the full parameter 'fc.weight' was read after its unit");
    refused(
        [](Changer& changer, const at::Tensor&) {  // without a gradient before
          const auto x = make_batch(1, 3, 7);
          changer(x);
          return x;
        },
        "used outside the forward of");
  });
}

}  // namespace tessera::testing
