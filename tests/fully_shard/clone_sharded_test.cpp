// Deep copies of sharded modules.

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/adam.h>

#include "dtensor/dtensor.h"
#include "fully_shard/clone_sharded.h"
#include "fully_shard/replicate.h"
#include "nn/sequential.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/tensor_parallel_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

struct LayerImpl : torch::nn::Cloneable<LayerImpl> {
  explicit LayerImpl(int64_t dim) : dim(dim) { reset(); }
  void reset() override { linear = register_module("linear", tessera::nn::Linear(dim, dim)); }
  at::Tensor forward(const at::Tensor& x) { return linear(x).tanh(); }

  int64_t dim;
  tessera::nn::Linear linear{nullptr};
};
TESSERA_MODULE(Layer);

/// Two units and a root with a tied pair, a frozen parameter and a buffer.
struct NetImpl : torch::nn::Cloneable<NetImpl> {
  explicit NetImpl(int64_t dim = 5) : dim(dim) { reset(); }
  void reset() override {
    in = register_module("in", tessera::nn::Linear(dim, dim));
    first = register_module("first", Layer(dim));
    second = register_module("second", Layer(dim));
    out = register_module("out", tessera::nn::Linear(dim, dim));
    offset = register_buffer("offset", at::ones({dim}));
  }
  at::Tensor forward(const at::Tensor& x) { return out(second(first(in(x)))) + offset; }

  int64_t dim;
  tessera::nn::Linear in{nullptr}, out{nullptr};
  Layer first{nullptr}, second{nullptr};
  at::Tensor offset;
};
TESSERA_MODULE(Net);

Net make_net(int64_t dim) {
  Net net(dim);
  fill_parameters(*net, 1);
  tie_parameter(*net->out, "weight", net->in->weight);
  net->in->bias.set_requires_grad(false);
  return net;
}

void shard_net(Net& net, const FullyShardOptions& options = {}) {
  fully_shard(net->first, options);
  fully_shard(net->second, options);
  fully_shard(net, options);
}

at::Tensor loss_of(Net& net, int batch) {
  return weighted_loss(net(make_batch(static_cast<uint64_t>(batch), 3, 5)));
}

}  // namespace

TEST_CASE("a copy of a sharded module trains as one process does, apart from its source", "[clone]") {
  const int world_size = GENERATE(1, 2, 3, 4);
  const bool replicates = GENERATE(false, true);
  run_ranks(world_size, [&](int rank) {
    auto reference = make_net(5), net = make_net(5);
    if (replicates) {
      replicate(net->first);
      replicate(net->second);
      replicate(net);
    } else {
      shard_net(net,
                {.shard_placement_fn = [](const at::Tensor& param) { return std::optional(Shard(param.dim() - 1)); }});
    }
    loss_of(net, 90 + rank).backward();
    net->offset.fill_(3);
    reference->offset.fill_(3);
    Net copy = clone_sharded(net);
    TESSERA_EXPECT(copy->out->weight.is_same(copy->in->weight) && !copy->in->weight.is_same(net->in->weight));
    TESSERA_EXPECT(!copy->in->bias.requires_grad() && copy->out->bias.requires_grad());
    TESSERA_EXPECT(!copy->out->bias.grad().defined() && net->out->bias.grad().defined());
    expect_equal(fsdp(copy).num_parameters(), fsdp(net).num_parameters());
    expect_equal(placements(copy->first->linear->weight), placements(net->first->linear->weight));
    torch::optim::Adam optimizer({copy->in->weight, copy->out->bias, copy->first->linear->weight});
    torch::optim::Adam reference_optimizer(
        {reference->in->weight, reference->out->bias, reference->first->linear->weight});
    const auto before = full_tensor(net->in->weight.detach()).clone();
    for (int step = 0; step < 3; ++step) {
      copy->zero_grad();
      auto loss = loss_of(copy, 10 * step + rank);
      loss.backward();
      average_reference(*reference, world_size, [&](int r) { loss_of(reference, 10 * step + r).backward(); });
      expect_bit_equal(loss.detach(), loss_of(reference, 10 * step + rank).detach());
      reference_optimizer.step();
      optimizer.step();
      expect_bit_equal(full_tensor(copy->first->linear->weight.detach()), reference->first->linear->weight.detach());
      expect_bit_equal(full_tensor(copy->in->weight.detach()), reference->in->weight.detach());
    }
    expect_bit_equal(full_tensor(net->in->weight.detach()), before);
  });
}

TEST_CASE("an exponential moving average in a copy equals that of whole tensors", "[clone]") {
  run_ranks(3, [](int rank) {
    auto net = make_net(5);
    shard_net(net);
    Net average = clone_sharded(net);
    torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(1e-2));
    auto expected = full_tensor(net->second->linear->weight.detach()).clone();
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      loss_of(net, 10 * step + rank).backward();
      optimizer.step();
      const at::NoGradGuard no_grad;
      const auto from = net->parameters(), to = average->parameters();
      for (size_t i = 0; i < from.size(); ++i) {
        to[i].lerp_(from[i], 0.25);
      }
      expected.lerp_(full_tensor(net->second->linear->weight), 0.25);
    }
    expect_close(full_tensor(average->second->linear->weight.detach()), expected);
    TESSERA_EXPECT(loss_of(average, rank).isfinite().item<bool>());
  });
}

TEST_CASE("a copy keeps offloading, precision, HSDP and lists of modules", "[clone]") {
  run_ranks(4, [](int rank) {
    auto net = make_net(5);
    const FullyShardOptions options{.mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicate", "dp"}),
                                    .mp_policy = {.param_dtype = at::kBFloat16},
                                    .offload_policy = CPUOffloadPolicy{}};
    fully_shard({&*net->first, &*net->second}, options);
    fully_shard(net, options);
    Net copy = clone_sharded(net);
    expect_equal(fsdp(copy->first).num_parameters(), 4u);
    expect_equal(device_mesh(copy->in->weight), device_mesh(net->in->weight));
    expect_bit_equal(loss_of(copy, rank).detach(), loss_of(net, rank).detach());
    fsdp(copy->second).unshard();
    TESSERA_EXPECT(copy->first->linear->weight.scalar_type() == at::kBFloat16);
    fsdp(copy->second).reshard();
    auto other = make_net(5);
    shard_net(other, {.ignored_params = {other->out->bias}});
    Net other_copy = clone_sharded(other);
    TESSERA_EXPECT(!is_dtensor(other_copy->out->bias) && other_copy->out->bias.equal(other->out->bias));
    expect_bit_equal(loss_of(other_copy, rank).detach(), loss_of(other, rank).detach());
  });
}

TEST_CASE("a copy's units have the parameters that the units of its source have", "[clone]") {
  run_ranks(GENERATE(1, 3), [](int rank) {
    auto net = make_net(5);
    fully_shard({&*net->first, &*net->second->linear});  // before the unit around it
    fully_shard(net->second);
    fully_shard({&*net->out, &*net->in});
    fully_shard(net);
    expect_throws<NotImplementedError>([&] { clone_sharded(net->second); }, "has modules outside of");
    Net copy = clone_sharded(net);
    expect_equal(fsdp(copy->first).num_parameters(), 4u);
    expect_equal(fsdp(copy->second).num_parameters(), 0u);
    expect_equal(fsdp(copy->out).num_parameters(), 3u);
    const Net again = clone_sharded(copy);
    loss_of(net, rank).backward();
    loss_of(copy, rank).backward();
    expect_bit_equal(to_local(copy->second->linear->weight.grad()), to_local(net->second->linear->weight.grad()));
    expect_bit_equal(to_local(copy->in->weight.grad()), to_local(net->in->weight.grad()));
    expect_equal(fsdp(again->first).num_parameters(), 4u);
  });
}

TEST_CASE("a layer that stands twice in a chain is one unit in the copy", "[clone]") {
  run_ranks(GENERATE(1, 2, 3), [](int rank) {
    tessera::nn::Linear shared(5, 5), between(5, 5);
    tessera::nn::Sequential net({{"a", shared}, {"b", between}, {"c", shared}});
    fill_parameters(*net, 1);
    fully_shard(shared);
    fully_shard(net);
    auto copy = clone_sharded(net);
    TESSERA_EXPECT(copy[0] == copy[2] && copy[0] != net[0]);
    const auto x = make_batch(static_cast<uint64_t>(rank), 3, 5);
    for (auto* model : {&net, &copy}) {
      weighted_loss((*model)(x)).backward();
    }
    for (size_t i = 0; i < 2; ++i) {
      expect_bit_equal(to_local(copy->parameters()[i].grad()), to_local(net->parameters()[i].grad()));
    }
    torch::nn::Sequential stock(shared, shared);
    expect_throws<NotImplementedError>([&] { clone_sharded(*stock); }, "Use tessera::nn::Sequential");
  });
}

TEST_CASE("what cannot be copied is refused and left as it is", "[clone]") {
  run_ranks(2, [](int rank) {
    auto net = make_net(5);
    shard_net(net);
    auto loss = loss_of(net, rank);
    expect_throws<StateError>([&] { clone_sharded(net); }, "finish the backward");
    loss.backward();
    auto kept = loss_of(net, rank);
    fsdp(net).reshard();
    if (rank != 1) {
      kept = at::Tensor();
    }
    expect_throws<StateError>([&] { clone_sharded(net); },
                              rank == 1 ? "clone_sharded: the unit 'root'" : "rank 1 cannot");
    kept = at::Tensor();
    clone_sharded(net);
    const auto handle = net->first->register_forward_hook([](HookPoint&, TensorRefs) {});
    expect_throws<NotImplementedError>([&] { clone_sharded(net); }, "has hooks or state attached");
    Tower tower;
    shard_tower(tower);
    expect_throws<NotImplementedError>([&] { clone_sharded(tower); }, "has no clone");
    loss_of(net, rank).backward();
  });
}

}  // namespace tessera::testing
