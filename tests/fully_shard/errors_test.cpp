// What fully_shard refuses, and how it says so.

#include <ATen/TensorOperators.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/small_models.h"
#include "third_party/catch2/catch.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

struct ScalarParamImpl : torch::nn::Module {
  ScalarParamImpl() { scale = register_parameter("scale", at::ones({})); }
  at::Tensor forward(at::Tensor x) { return x * scale; }
  at::Tensor scale;
};
TESSERA_MODULE(ScalarParam);

struct SharedImpl : torch::nn::Module {
  SharedImpl() {
    a = register_module("a", tessera::nn::Linear(4, 4));
    b = register_module("b", tessera::nn::Linear(4, 4));
    b->weight = b->register_parameter("tied", a->weight);
  }
  at::Tensor forward(at::Tensor x) { return b(a(x)); }
  tessera::nn::Linear a{nullptr}, b{nullptr};
};
TESSERA_MODULE(Shared);

}  // namespace

TEST_CASE("a module whose type has no hook point is refused with the remedies") {
  run_ranks(2, [](int) {
    torch::nn::Linear stock(4, 4);
    expect_throws<StateError>([&] { fully_shard(stock); }, "torch::nn::LinearImpl");
    expect_throws<StateError>([&] { fully_shard(stock); }, "TESSERA_MODULE");
    expect_throws<StateError>([&] { fully_shard(stock); }, "hooked(");
  });
}

TEST_CASE("a unit twice, top-down wrapping, and a parameter of two units are refused") {
  run_ranks(2, [](int) {
    Tower tower;
    fully_shard(tower);
    expect_throws<StateError>([&] { fully_shard(tower); }, "unit already");
    expect_throws<ValueError>([&] { fully_shard(tower->blocks[0]); }, "Shard submodules before");
    expect_throws<ValueError>([&] { fully_shard(tower->blocks[0]); }, "block0.up.weight");
    Shared shared;
    fully_shard(shared->a);
    expect_throws<ValueError>([&] { fully_shard(shared->b); }, "that two modules share");
  });
}

TEST_CASE("scalars, mixed dtypes and meshes of two axes are refused by name") {
  run_ranks(4, [](int) {
    ScalarParam scalar;
    expect_throws<ValueError>([&] { fully_shard(scalar); }, "'scale' is a scalar");
    Block mixed(4, 4);
    mixed->up->weight.set_data(mixed->up->weight.to(at::kDouble));
    expect_throws<ValueError>([&] { fully_shard(mixed); }, "'up.bias' is Float");
    Block block(4, 4);
    auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    expect_throws<ValueError>([&] { fully_shard(block, {.mesh = mesh}); }, "{dp: 2, tp: 2}");
    fully_shard(block, {.mesh = mesh["dp"]});
    expect_throws<StateError>([&] { fsdp(*block->up); }, "was not called");
  });
}

TEST_CASE("a parameter that is used while sharded is named with its module and the remedy") {
  run_ranks(2, [](int) {
    Tower tower;
    shard_tower(tower);
    const auto use = [&] { tower->blocks[1]->up(make_batch(1, 3, 17)); };
    expect_throws<StateError>(use, "'up.bias' is sharded");
    expect_throws<StateError>(use, "BlockImpl");
    expect_throws<StateError>(use, "unshard()");
    fsdp(tower->blocks[1]).unshard();
    use();
    fsdp(tower->blocks[1]).reshard();
    expect_throws<StateError>(use, "'up.bias' is sharded");
  });
}

TEST_CASE("an optimizer step before backward is an error") {
  run_ranks(2, [](int) {
    Tower tower;
    fill_parameters(*tower, 1);
    torch::optim::SGD optimizer(tower->parameters(), torch::optim::SGDOptions(0.1));
    shard_tower(tower);
    expect_throws<StateError>([&] { fsdp(tower).check_ready_for_step(); }, "no parameter of");
    auto loss = weighted_loss(tower(make_batch(1, 3, 5)));
    expect_throws<StateError>([&] { fsdp(tower).check_ready_for_step(); }, "still awaits its backward");
    loss.backward();
    fsdp(tower).check_ready_for_step();
    optimizer.step();

    // Stale gradients: the root's parameters are unsharded and meet sharded gradients.
    auto second = weighted_loss(tower(make_batch(1, 3, 5)));
    expect_throws<StateError>([&] { optimizer.step(); }, "run backward() first");
    second.backward();
  });
}

TEST_CASE("parameters changed between forward and backward are an error that names one") {
  run_ranks(2, [](int) {
    Tower tower;
    fill_parameters(*tower, 1);
    shard_tower(tower, {.reshard_after_forward = true});
    torch::optim::SGD optimizer(tower->parameters(), torch::optim::SGDOptions(0.1));
    weighted_loss(tower(make_batch(1, 3, 5))).backward();
    auto loss = weighted_loss(tower(make_batch(1, 3, 5)));
    optimizer.step();
    expect_throws<StateError>([&] { loss.backward(); }, "changed in place between forward and backward");
  });
}

TEST_CASE("converting a module after sharding is an error at its next use") {
  run_ranks(2, [](int) {
    Block block(4, 4);
    fully_shard(block);
    block->to(at::kDouble);
    expect_throws<StateError>([&] { block(make_batch(1, 3, 4)); }, "were replaced after it was sharded");
  });
}
