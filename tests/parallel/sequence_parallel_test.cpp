#include "parallel/sequence_parallel.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>

#include "debug/comm_debug_mode.h"
#include "dtensor/random/random.h"
#include "nn/modules.h"
#include "parallel/distribute_module.h"
#include "parallel/linear_styles.h"
#include "parallel/parallelize_module.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/parallel/tp_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// A norm and two linear layers: outside of the latter, activations are shards of the sequence.
nn::Sequential make_block(int64_t dim) {
  nn::Sequential block;
  block->push_back("norm", nn::LayerNorm(torch::nn::LayerNormOptions({dim})));
  nn::Sequential mlp;
  mlp->push_back("in_proj", nn::Linear(dim, 3 * dim));
  mlp->push_back("act", nn::GELU());
  mlp->push_back("out_proj", nn::Linear(3 * dim, dim));
  block->push_back("mlp", mlp);
  fill_in_double(*block, 4);
  return block;
}

ParallelPlan block_plan() {
  return {{"norm", SequenceParallel()},
          {"mlp.in_proj", ColwiseParallel()},
          {"mlp.out_proj", RowwiseParallel({.output_layouts = Shard(1), .use_local_output = false})}};
}

/// Mixes the positions.
struct TotalImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x.sum(1); }
};
TESSERA_MODULE(Total);

template <class Norm>
void check_norm(const std::function<Norm()>& make, const SequenceParallelOptions& options, const at::Tensor& input,
                int ranks) {
  run_ranks(ranks, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {ranks}, {"tp"});
    Norm reference = make(), sharded = make();
    parallelize_module(sharded, mesh, SequenceParallel(options));
    const auto shape = input.sizes().vec();
    const Placements cut{Shard(options.sequence_dim)};
    train_and_compare(
        {.reference = *reference,
         .sharded = *sharded,
         .run_reference = [&](const at::Tensor& x) { return reference(x); },
         .run_sharded =
             [&](const at::Tensor& x) {
               const auto part = to_local(redistribute(from_local(x, mesh, {Replicate()}), cut));
               const auto out = sharded(part);
               return full_tensor(options.use_local_output ? from_local(out, mesh, cut, {.shape = shape}) : out);
             }},
        input);
  });
}

}  // namespace

TEST_CASE("norms on shards of the sequence equal plain ones", "[parallel]") {
  const std::function<nn::LayerNorm()> layer_norm = [] {
    nn::LayerNorm norm(torch::nn::LayerNormOptions({6}));
    fill_in_double(*norm, 1);
    return norm;
  };
  const std::function<nn::RMSNorm()> rms_norm = [] {
    nn::RMSNorm norm(nn::RMSNormOptions(6).eps(1e-6));
    fill_in_double(*norm, 1);
    return norm;
  };
  for (const int ranks : {1, 2, 3, 4}) {
    for (const int64_t length : {1, 3, 8, 17}) {
      check_norm(layer_norm, {}, make_input(1, {2, length, 6}), ranks);
      check_norm(rms_norm, {}, make_input(1, {2, length, 6}), ranks);
      check_norm(layer_norm, {.sequence_dim = 0, .use_local_output = true}, make_input(1, {length, 6}), ranks);
    }
  }
}

TEST_CASE("dropout on shards of the sequence drops what one process drops", "[parallel]") {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks}, {"tp"});
      nn::Dropout dropout(0.4);
      parallelize_module(dropout, mesh, SequenceParallel());
      const auto x = make_input(1, {2, 5, 3});
      manual_seed(9);
      const auto cut = full_tensor(dropout(redistribute(from_local(x, mesh, {Replicate()}), {Shard(1)})));
      manual_seed(9);
      const auto replicated = full_tensor(at::dropout(from_local(x, mesh, {Replicate()}), 0.4, /*train=*/true));
      expect_bit_equal(cut, replicated);
      TESSERA_EXPECT(cut.eq(0).any().item<bool>());
      TESSERA_EXPECT(cut.ne(0).any().item<bool>());
    });
  }
}

TEST_CASE("a sequence-parallel block trains as a plain one", "[parallel]") {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks}, {"tp"});
      for (const int64_t dim : {3, 16, 17}) {
        auto reference = make_block(dim), sharded = make_block(dim);
        parallelize_module(sharded, mesh, block_plan());
        train_and_compare({.reference = *reference,
                           .sharded = *sharded,
                           .run_reference = [&](const at::Tensor& x) { return reference(x); },
                           .run_sharded =
                               [&](const at::Tensor& x) {
                                 return whole(sharded(redistribute(from_local(x, mesh, {Replicate()}), {Shard(1)})));
                               }},
                          make_input(1, {2, 5, dim}));
      }
    });
  }
}

TEST_CASE("parameters that were frozen when they were distributed train when they are unfrozen", "[parallel]") {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3}, {"tp"});
    auto reference = make_block(5), sharded = make_block(5);
    for (const auto& parameter : sharded->parameters()) {
      parameter.set_requires_grad(false);
    }
    parallelize_module(sharded, mesh, block_plan());
    for (const auto& parameter : sharded->parameters()) {
      TESSERA_EXPECT(!parameter.requires_grad());
      parameter.set_requires_grad(true);
    }
    train_and_compare({.reference = *reference,
                       .sharded = *sharded,
                       .run_reference = [&](const at::Tensor& x) { return reference(x); },
                       .run_sharded =
                           [&](const at::Tensor& x) {
                             return whole(sharded(redistribute(from_local(x, mesh, {Replicate()}), {Shard(1)})));
                           }},
                      make_input(1, {2, 5, 5}));
  });
}

TEST_CASE("sequence parallelism gathers and scatters once a direction", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    auto block = make_block(6);
    parallelize_module(block, mesh, block_plan());
    const auto input = distribute_tensor(make_input(2, {2, 4, 6}), mesh, {Shard(1)}).set_requires_grad(true);
    at::Tensor out;
    {
      CommDebugMode mode;
      out = block(input);
      expect_equal(mode.calls(), 2);
      expect_equal(mode.calls(Collective::AllGather), 1);
      expect_equal(mode.calls(Collective::ReduceScatter), 1);
    }
    const auto grad = distribute_tensor(make_input(3, {2, 4, 6}), mesh, {Shard(1)});
    CommDebugMode mode;
    out.backward(grad);
    expect_equal(mode.calls(Collective::AllGather), 1);
    expect_equal(mode.calls(Collective::ReduceScatter), 1);
    expect_equal(mode.calls(Collective::AllReduce), 2);  // the norm's weight and bias
    expect_equal(mode.calls(), 4);
  });
}

TEST_CASE("plain shards of a sequence cost one exchange of sizes, unless they are said to be even", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    for (const bool even : {false, true}) {
      nn::LayerNorm norm(torch::nn::LayerNormOptions({6}));
      fill_in_double(*norm, 1);
      parallelize_module(norm, mesh, SequenceParallel({.even_shards = even}));
      CommDebugMode mode;
      const auto out = norm(make_input(1, {1, 2, 6}));
      expect_equal(out.size(1), 4);
      expect_equal(mode.calls(), even ? 0 : 1);
      expect_equal(mode.calls(Collective::AllGather), even ? 0 : 1);
    }
  });
}

TEST_CASE("a local output of a pending sum is the sum", "[parallel]") {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3}, {"tp"});
    Total total;
    parallelize_module(total, mesh, SequenceParallel({.use_local_output = true}));
    const auto x = make_input(1, {2, 5, 6}).set_requires_grad(true);
    auto out = total(redistribute(from_local(x, mesh, {Replicate()}), {Shard(1)}));
    expect_close(out.detach(), x.detach().sum(1));
    out.mul_(2);  // a tensor of its own
    out.sum().backward();
    expect_close(x.grad(), at::full_like(x, 2));
  });
}

TEST_CASE("what SequenceParallel refuses", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    nn::Sequential model(torch::nn::LayerNorm(torch::nn::LayerNormOptions({5})));
    expect_throws<StateError>(
        [&] {
          parallelize_module(model, mesh, {{"0", SequenceParallel()}});
        },
        "SequenceParallel(\"0\"): modules of type torch::nn::LayerNormImpl have no hook point");
    nn::LayerNorm norm(torch::nn::LayerNormOptions({5}));
    distribute_parameter(*norm, "bias", mesh, {Shard(0)});
    expect_throws<ValueError>([&] { parallelize_module(norm, mesh, SequenceParallel()); },
                              "SequenceParallel(the module itself): its \"bias\" is Float[5] (Shard(0))");
    expect_throws<ValueError>([&] { parallelize_module(nn::Sequential(norm), mesh, SequenceParallel()); },
                              "SequenceParallel(the module itself): its \"0.bias\" is Float[5] (Shard(0))");
  });
}

}  // namespace tessera::testing
