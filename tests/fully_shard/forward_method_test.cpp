// Entry points beside forward, and parameters that several modules share.

#include "fully_shard/forward_method.h"

#include <ATen/TensorOperators.h>

#include "dtensor/dtensor.h"
#include "fully_shard/replicate.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

struct EncoderImpl : torch::nn::Module {
  EncoderImpl() {
    trunk = register_module("trunk", Block(5, 7));
    scale = register_parameter("scale", at::ones({5}));
    head = register_module("head", tessera::nn::Linear(5, 3));
  }
  at::Tensor forward(at::Tensor x) { return head(encode(x)); }
  at::Tensor encode(at::Tensor x) {
    return forward_method(
        *this, [this](at::Tensor input) { return trunk(input) * scale; }, x);
  }
  /// Forgets to say that it is an entry point.
  at::Tensor encode_without_hooks(at::Tensor x) { return trunk(x) * scale; }

  Block trunk{nullptr};
  at::Tensor scale;
  tessera::nn::Linear head{nullptr};
};
TESSERA_MODULE(Encoder);

/// b uses the weight of a; its own is not used.
struct TiedLayersImpl : torch::nn::Module {
  TiedLayersImpl() {
    a = register_module("a", tessera::nn::Linear(4, 4));
    b = register_module("b", tessera::nn::Linear(4, 4));
    b->weight = b->register_parameter("tied", a->weight);
  }
  at::Tensor forward(at::Tensor x) { return b(a(x).tanh()); }
  tessera::nn::Linear a{nullptr}, b{nullptr};
};
TESSERA_MODULE(TiedLayers);

template <class Model>
Model filled() {
  Model model;
  fill_parameters(*model, 3);
  return model;
}

at::Tensor batch(int rank) {
  return make_batch(static_cast<uint64_t>(rank), 3, 5);
}

}  // namespace

TEST_CASE("another entry point than forward gathers, reshards and reduces", "[fully_shard]") {
  run_ranks(3, [](int rank) {
    auto reference = filled<Encoder>(), encoder = filled<Encoder>();
    fully_shard(encoder->trunk);
    fully_shard(encoder, {.reshard_after_forward = true});
    std::vector<std::string> events;
    fsdp(encoder).set_event_observer([&](const FSDPEvent& event) { events.push_back(to_string(event)); });
    auto loss = weighted_loss(encoder->encode(batch(rank)));
    expect_equal(events, std::vector<std::string>{"gather root", "unshard root", "forward root", "gather trunk",
                                                  "unshard trunk", "forward trunk", "reshard trunk", "reshard root"});
    expect_equal(fsdp(encoder).unsharded_bytes(), 0u);
    loss.backward();
    average_reference(*reference, 3, [&](int r) { weighted_loss(reference->encode(batch(r))).backward(); });
    check_sharded_parity(reference, encoder, {.tolerance = {.rtol = 0, .atol = 0}});
    TESSERA_EXPECT(!encoder->head->weight.grad().defined());
  });
}

TEST_CASE("an entry point may be called by forward and beside it in one iteration", "[fully_shard]") {
  run_ranks(2, [](int rank) {
    auto reference = filled<Encoder>(), encoder = filled<Encoder>();
    fully_shard(encoder->trunk);
    fully_shard(encoder);
    const auto loss = [](Encoder& of, int r) {
      return weighted_loss(of(batch(r))) + weighted_loss(of->encode(batch(r + 10)));
    };
    loss(encoder, rank).backward();
    average_reference(*reference, 2, [&](int r) { loss(reference, r).backward(); });
    check_sharded_parity(reference, encoder, {.tolerance = {.rtol = 1e-6, .atol = 1e-7}});
  });
}

TEST_CASE("a method that is not said to be an entry point names the parameter and the remedies", "[fully_shard]") {
  run_ranks(2, [](int rank) {
    auto encoder = filled<Encoder>();
    fully_shard(encoder);
    expect_throws<StateError>([&] { encoder->encode_without_hooks(batch(rank)); }, "is sharded");
    encoder->encode(batch(rank));
  });
}

TEST_CASE("a parameter that modules of one unit share gets the sum of its uses' gradients", "[fully_shard]") {
  const bool as_list = GENERATE(false, true);
  run_ranks(3, [&](int rank) {
    auto reference = filled<TiedLayers>(), tied = filled<TiedLayers>();
    const auto loss = [](TiedLayers& of, int r) {
      return weighted_loss(of(make_batch(static_cast<uint64_t>(r), 3, 4)));
    };
    as_list ? fully_shard({&*tied->a, &*tied->b}) : fully_shard(tied);
    TESSERA_EXPECT(tied->a->weight.is_same(tied->b->weight));
    loss(tied, rank).backward();
    average_reference(*reference, 3, [&](int r) { loss(reference, r).backward(); });
    check_sharded_parity(reference, tied, {.tolerance = {.rtol = 1e-6, .atol = 1e-7}});
  });
}

TEST_CASE("a parameter that modules of two units would share is refused with the remedy", "[fully_shard]") {
  run_ranks(2, [](int) {
    auto tied = filled<TiedLayers>();
    fully_shard(tied->a);
    expect_throws<ValueError>([&] { replicate(tied->b); },
                              "replicate(torch::nn::LinearImpl): parameter 'tied' belongs to the unit "
                              "torch::nn::LinearImpl already, as 'weight'. Shard submodules before the modules that "
                              "contain them; a parameter that two modules share must be in one unit, that of a module "
                              "that contains both, or of a list of both");
  });
}

}  // namespace tessera::testing
