#include "parallel/linear_styles.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>

#include <utility>

#include "debug/comm_debug_mode.h"
#include "nn/modules.h"
#include "parallel/distribute_module.h"
#include "parallel/parallelize_module.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/parallel/tp_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// [3 positions + ..., in] of an integer kind: 2 x 7 indices below `rows`.
at::Tensor make_indices(int64_t rows) {
  return at::randint(rows, {2, 7}, make_generator(11), at::kLong);
}

nn::Linear make_linear(int64_t in, int64_t out, bool bias = true) {
  nn::Linear linear(torch::nn::LinearOptions(in, out).bias(bias));
  fill_in_double(*linear, 3);
  return linear;
}

nn::Embedding make_embedding(int64_t rows, int64_t features) {
  nn::Embedding embedding(torch::nn::EmbeddingOptions(rows, features));
  fill_in_double(*embedding, 5);
  return embedding;
}

/// Trains a layer under `plan` beside a plain one. `prepare` makes the layer's input of the whole one, `finish` the
/// whole output of the layer's.
template <class Layer>
void check_layer(const Layer& plain, const Layer& cut, const DeviceMesh& mesh, const ParallelPlan& plan,
                 const at::Tensor& input, const Forward& prepare, const Forward& finish) {
  Layer reference = plain, sharded = cut;
  parallelize_module(sharded, mesh, plan);
  train_and_compare({.reference = *reference,
                     .sharded = *sharded,
                     .run_reference = [&](const at::Tensor& x) { return reference(x); },
                     .run_sharded = [&](const at::Tensor& x) { return finish(sharded(prepare(x))); }},
                    input);
}

at::Tensor same(const at::Tensor& x) {
  return x;
}

/// Two layers, and what a model does between them.
struct TwoLayersImpl : torch::nn::Module {
  TwoLayersImpl(int64_t up_features, int64_t down_features, Forward function) : between(std::move(function)) {
    up = register_module("up", nn::Linear(8, up_features));
    down = register_module("down", nn::Linear(down_features, 5));
    fill_in_double(*this, 7);
  }
  at::Tensor forward(const at::Tensor& x) { return down(between(up(x))); }
  nn::Linear up{nullptr}, down{nullptr};
  Forward between;
};
TESSERA_MODULE(TwoLayers);

at::Tensor gated(const at::Tensor& x) {
  const auto halves = x.chunk(2, -1);
  return at::silu(halves[0]) * halves[1];
}

at::Tensor attention_of_two_heads(const at::Tensor& x) {
  const auto by_head = [&](const at::Tensor& part) { return part.view({x.size(0), x.size(1), 2, -1}).transpose(1, 2); };
  const auto parts = x.chunk(3, -1);
  const auto out = at::scaled_dot_product_attention(by_head(parts[0]), by_head(parts[1]), by_head(parts[2]));
  return out.transpose(1, 2).reshape({x.size(0), x.size(1), -1});
}

at::Tensor shares(const at::Tensor& x) {
  return x.softmax(-1);
}

/// This rank's part of a plain tensor that all ranks hold, by torch.chunk; differentiable over all ranks.
at::Tensor own_part(const at::Tensor& tensor, const DeviceMesh& mesh, int64_t dim) {
  return to_local(redistribute(from_local(tensor, mesh, {Replicate()}), {Shard(dim)}));
}

/// The whole of what own_part cuts.
at::Tensor joined(const at::Tensor& part, const DeviceMesh& mesh, int64_t dim, std::vector<int64_t> shape) {
  return full_tensor(from_local(part, mesh, {Shard(dim)}, {.shape = std::move(shape)}));
}

}  // namespace

TEST_CASE("column-wise linear layers equal plain ones", "[parallel]") {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks}, {"tp"});
      for (const int64_t out : {1, 3, 16, 17}) {
        const auto input = make_input(1, {2, 5, 7});
        const auto layer = [&](bool bias = true) { return make_linear(7, out, bias); };
        // Plain and whole in, plain shards out.
        check_layer(layer(), layer(), mesh, ColwiseParallel({.use_local_output = true}), input, same,
                    [&](const at::Tensor& y) {
                      return joined(y, mesh, 2, {2, 5, out});
                    });
        // A DTensor out, and no bias.
        check_layer(layer(false), layer(false), mesh, ColwiseParallel(), input, same, whole);
        // Shards of the sequence in, plain and as a DTensor; the whole out.
        const auto by_sequence = ColwiseParallel({.input_layouts = Shard(1), .output_layouts = Replicate()});
        check_layer(
            layer(), layer(), mesh, by_sequence, input, [&](const at::Tensor& x) { return own_part(x, mesh, 1); },
            same);
        check_layer(
            layer(), layer(), mesh, by_sequence, input,
            [&](const at::Tensor& x) { return redistribute(from_local(x, mesh, {Replicate()}), {Shard(2)}); }, same);
      }
    });
  }
}

TEST_CASE("row-wise linear layers equal plain ones", "[parallel]") {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks}, {"tp"});
      for (const int64_t in : {1, 3, 16, 17}) {
        const auto input = make_input(1, {2, 5, in});
        const auto layer = [&](bool bias = true) { return make_linear(in, 7, bias); };
        // Plain shards of the features in, also uneven and empty ones; plain and whole out.
        check_layer(
            layer(), layer(), mesh, RowwiseParallel(), input, [&](const at::Tensor& x) { return own_part(x, mesh, 2); },
            same);
        // Whole in, shards of the sequence out.
        check_layer(layer(), layer(), mesh, RowwiseParallel({.input_layouts = Replicate(), .output_layouts = Shard(1)}),
                    input, same, [&](const at::Tensor& y) {
                      return joined(y, mesh, 1, {2, 5, 7});
                    });
        check_layer(
            layer(false), layer(false), mesh, RowwiseParallel({.use_local_output = false}), input,
            [&](const at::Tensor& x) { return redistribute(from_local(x, mesh, {Replicate()}), {Shard(-1)}); }, whole);
      }
    });
  }
}

TEST_CASE("embeddings cut by features and by rows equal plain ones", "[parallel]") {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks}, {"tp"});
      for (const int64_t size : {2, 3, 16, 17}) {
        const auto layer = [&] { return make_embedding(size, 5); };
        const auto wide = [&] { return make_embedding(9, size); };
        check_layer(wide(), wide(), mesh, ColwiseParallel({.use_local_output = true}), make_indices(9), same,
                    [&](const at::Tensor& y) {
                      return joined(y, mesh, 2, {2, 7, size});
                    });
        check_layer(layer(), layer(), mesh, RowwiseParallel(), make_indices(size), same, same);
        check_layer(layer(), layer(), mesh, RowwiseParallel({.output_layouts = Shard(1), .use_local_output = false}),
                    make_indices(size), same, whole);
        // Each rank has the indices of its positions.
        check_layer(
            layer(), layer(), mesh, RowwiseParallel({.input_layouts = Shard(1)}), make_indices(size),
            [&](const at::Tensor& x) { return own_part(x, mesh, 1); }, same);
      }
    });
  }
}

TEST_CASE("an index outside a vocabulary-parallel table is an error on every rank", "[parallel]") {
  run_ranks(2, [](int) {
    auto embedding = make_embedding(5, 3);
    parallelize_module(embedding, init_device_mesh(at::kCPU, {2}), RowwiseParallel());
    // The kernel's own text: a rank that threw alone would leave the other one with an error of communication.
    const auto text = error_text([&] { embedding(at::arange(6)); });
    TESSERA_EXPECT(text.find("index out of range") != std::string::npos);
  });
}

TEST_CASE("tied embedding and head share their cut", "[parallel]") {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks}, {"tp"});
      struct TiedImpl : torch::nn::Module {
        TiedImpl() {
          embed = register_module("embed", nn::Embedding(11, 6));
          head = register_module("head", nn::Linear(torch::nn::LinearOptions(6, 11).bias(false)));
          tie_parameter(*head, "weight", embed->weight);
          fill_in_double(*this, 2);
        }
        at::Tensor forward(const at::Tensor& x) { return head(embed(x)); }
        nn::Embedding embed{nullptr};
        nn::Linear head{nullptr};
      };
      TiedImpl reference, sharded;
      parallelize_module(sharded, mesh,
                         {{"embed", RowwiseParallel()}, {"head", ColwiseParallel({.output_layouts = Replicate()})}});
      TESSERA_EXPECT(sharded.embed->weight.is_same(sharded.head->weight));
      train_and_compare({.reference = reference,
                         .sharded = sharded,
                         .run_reference = [&](const at::Tensor& x) { return reference.forward(x); },
                         .run_sharded = [&](const at::Tensor& x) { return sharded.forward(x); }},
                        make_indices(11));
    });
  }
}

TEST_CASE("column-wise, then row-wise costs one all-reduce a direction", "[parallel]") {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3}, {"tp"});
    MLP mlp(5, MLPOptions{.dim_multiplier = 2});
    fill_in_double(*mlp, 1);
    parallelize_module(mlp, mesh, {{"in_proj", ColwiseParallel()}, {"out_proj", RowwiseParallel()}});
    const auto input = make_input(2, {2, 4, 5}).set_requires_grad(true);
    constexpr int64_t kBytes = 2 * 4 * 5 * 8 * 2 * 2 / 3;  // a ring's share: 2 (n - 1) / n of [2, 4, 5] doubles
    at::Tensor loss;
    {
      CommDebugMode mode;
      loss = weighted_loss(mlp(input));
      expect_equal(mode.calls(), 1);
      expect_equal(mode.calls(Collective::AllReduce), 1);
      expect_equal(mode.bytes_sent(), kBytes);
    }
    CommDebugMode mode;
    loss.backward();
    expect_equal(mode.calls(), 1);
    expect_equal(mode.calls(Collective::AllReduce), 1);
    expect_equal(mode.bytes_sent(), kBytes);
  });
}

TEST_CASE("what the linear styles refuse", "[parallel]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    nn::Sequential model(nn::Linear(5, 6), nn::ReLU(), torch::nn::Linear(6, 5));
    expect_equal(error_text([&] {
                   parallelize_module(model, mesh, {{"1", ColwiseParallel()}});
                 }),
                 std::string("ColwiseParallel(\"1\"): a module of type torch::nn::ReLUImpl, but the style knows how to "
                             "cut torch::nn::LinearImpl and torch::nn::EmbeddingImpl. Name such a module in the plan, "
                             "or derive a style from ParallelStyle"));
    expect_equal(error_text([&] {
                   parallelize_module(model, mesh, {{"2", RowwiseParallel()}});
                 }),
                 std::string("RowwiseParallel(\"2\"): modules of type torch::nn::LinearImpl have no hook point, so "
                             "nothing can run before and after their forward. Declare the type's holder with "
                             "TESSERA_MODULE(Name) in place of TORCH_MODULE(Name), use tessera::nn::* in place of "
                             "torch::nn::*, or wrap the module with tessera::hooked(module). A layer that a module of "
                             "libtorch made and calls by itself, as the linear ones of TransformerEncoderLayer, takes "
                             "none of these: give that module"));
    auto row = make_linear(5, 2);
    parallelize_module(row, mesh, RowwiseParallel());
    expect_equal(
        error_text([&] {
          row(make_input(1, {4, 5}));
        }),
        fmt::format("RowwiseParallel(the module itself): the plain input has sizes [4, 5], but this rank's "
                    "part of 5 in dim 1, cut over 2 ranks, is {}. Pass that part, or set input_layouts to what "
                    "the input is",
                    rank == 0 ? 3 : 2));
    expect_equal(error_text([&] { row(at::Tensor()); }),
                 std::string("RowwiseParallel(the module itself): forward was called with an undefined tensor"));
    auto column = make_linear(5, 2);
    parallelize_module(column, mesh, ColwiseParallel({.input_layouts = Shard(0)}));
    expect_equal(error_text([&] {
                   column(make_input(1, {rank == 0 ? 1 : 4, 5}));
                 }),
                 std::string("ColwiseParallel(the module itself): the ranks' plain inputs have [1, 4] in dim 0, which "
                             "is not how 5 is cut: [3, 2]. Pass shards as torch.chunk makes them, or DTensors"));
    expect_equal(error_text([&] {
                   column(make_input(1, {3, rank == 0 ? 5 : 4}));
                 }),
                 std::string("ColwiseParallel(the module itself): the ranks' plain inputs differ in dtype or in other "
                             "dims than the sharded 0"));
    auto scattered = make_linear(5, 2);
    parallelize_module(scattered, mesh, RowwiseParallel({.input_layouts = Replicate(), .output_layouts = Shard(1)}));
    expect_equal(error_text([&] { scattered(make_input(1, {5})); }),
                 std::string("RowwiseParallel(the module itself): Shard(1) on a tensor of 1 dims; dim must be in [-1, "
                             "0]"));
    const auto other = init_device_mesh(at::kCPU, {2}, {"dp"});
    expect_equal(error_text([&] {
                   column(distribute_tensor(make_input(1, {4, 5}), other, {Shard(0)}));
                 }),
                 std::string("ColwiseParallel(the module itself): an input is Double[4, 5] (Shard(0)) on "
                             "DeviceMesh(cpu, {dp: 2}), but the style works on DeviceMesh(cpu, {tp: 2}). "
                             "redistribute() it to that mesh, or pass its local tensor"));
    auto sharded = make_linear(5, 2);
    distribute_parameter(*sharded, "weight", mesh, {Shard(1)});
    expect_equal(error_text([&] { parallelize_module(sharded, mesh, ColwiseParallel()); }),
                 std::string("ColwiseParallel(the module itself): its \"weight\" is Double[2, 5] (Shard(1)) on "
                             "DeviceMesh(cpu, {tp: 2}) already, and the style needs (Shard(0)) on DeviceMesh(cpu, {tp: "
                             "2}). Use one style a parameter, also for tied ones"));
    const nn::Embedding sparse(torch::nn::EmbeddingOptions(6, 4).sparse(true));
    for (const ParallelPlan& plan : {ParallelPlan(ColwiseParallel()), ParallelPlan(RowwiseParallel())}) {
      expect_throws<NotImplementedError>([&] { parallelize_module(sparse, mesh, plan); },
                                         "an Embedding with sparse gradients, and DTensors are dense; make it with "
                                         "sparse(false)");
    }
    auto used = make_linear(5, 2);
    used->bias.mutable_grad() = at::ones_like(used->bias);
    expect_equal(
        error_text([&] { parallelize_module(used, mesh, ColwiseParallel()); }),
        std::string("ColwiseParallel(the module itself): its \"bias\" has a gradient already, which would stay "
                    "whole; call zero_grad() before parallelize_module"));
    TESSERA_EXPECT(!is_dtensor(used->weight));
  });
}

TEST_CASE("what is done between a column-wise and a row-wise layer is done to all features", "[parallel]") {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks}, {"tp"});
      const ParallelPlan plan{{"up", ColwiseParallel()}, {"down", RowwiseParallel()}};
      const auto input = make_input(1, {2, 5, 8});
      const auto check = [&](int64_t up, int64_t down, const Forward& between) {
        check_layer(TwoLayers(up, down, between), TwoLayers(up, down, between), mesh, plan, input, same, same);
      };
      check(22, 11, gated);
      check(7, 7, shares);
      check(24, 8, attention_of_two_heads);
    });
  }
}

TEST_CASE("an input that has not the features of a column-wise layer is refused, with the layer named", "[parallel]") {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks}, {"tp"});
      const auto make = [&](ColwiseParallelOptions first, ColwiseParallelOptions second) {
        nn::Sequential model(make_linear(5, 12), make_linear(12, 4));
        parallelize_module(model, mesh, {{"0", ColwiseParallel(first)}, {"1", ColwiseParallel(second)}});
        return model;
      };
      const auto input = make_input(1, {2, 5});
      auto wrong = make({.use_local_output = true}, {});
      expect_throws<ValueError>([&] { wrong(input); },
                                fmt::format("ColwiseParallel(\"1\"): the input has sizes [2, {}], but the layer takes "
                                            "12 features. If it is a rank's part of them",
                                            12 / ranks));
      make({.use_local_output = true}, {.input_layouts = Shard(-1)})(input);
      make({.output_layouts = Replicate()}, {})(input);
      auto by_sequence = make({}, {.input_layouts = Shard(0)});
      expect_throws<ValueError>([&] { by_sequence(make_input(1, {2, 7})); }, "ColwiseParallel(\"0\"): the input has");
    });
  }
}

}  // namespace tessera::testing
