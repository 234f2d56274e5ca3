// fully_shard and replicate in one model: which module has which, what each takes, and parity with one process.
// After test_replicate_with_fsdp.py of PyTorch, whose checks that compare zeros or nothing are replaced by such that
// cannot pass so: gradients and parameters are compared every step, and losses are not zero.

#include <ATen/ops/arange.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/optim/adam.h>

#include <functional>

#include "dtensor/dtensor.h"
#include "fully_shard/composable_apis.h"
#include "fully_shard/replicate.h"
#include "nn/modules.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr int64_t kDim = 16, kHeads = 4, kVocabulary = 8, kLength = 16;

nn::Linear linear(int64_t in, int64_t out, bool bias) {
  return nn::Linear(torch::nn::LinearOptions(in, out).bias(bias));
}

/// 6 modules: itself, four projections and the dropout.
struct AttentionImpl : torch::nn::Module {
  AttentionImpl() {
    wq = register_module("wq", linear(kDim, kDim, false));
    wk = register_module("wk", linear(kDim, kDim, false));
    wv = register_module("wv", linear(kDim, kDim, false));
    wo = register_module("wo", linear(kDim, kDim, false));
    dropout = register_module("resid_dropout", nn::Dropout(0.));
  }
  at::Tensor forward(at::Tensor x) {
    const auto heads = [&](const at::Tensor& y) {
      return y.view({y.size(0), y.size(1), kHeads, kDim / kHeads}).transpose(1, 2);
    };
    const auto y = at::scaled_dot_product_attention(heads(wq(x)), heads(wk(x)), heads(wv(x)), {}, 0., true);
    return dropout(wo(y.transpose(1, 2).reshape(x.sizes())));
  }
  nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr};
  nn::Dropout dropout{nullptr};
};
TESSERA_MODULE(Attention);

/// 5 modules: itself, two layers, the activation and the dropout.
struct FeedForwardImpl : torch::nn::Module {
  FeedForwardImpl() {
    w1 = register_module("w1", linear(kDim, 4 * kDim, true));
    gelu = register_module("gelu", nn::GELU());
    w2 = register_module("w2", linear(4 * kDim, kDim, true));
    dropout = register_module("resid_dropout", nn::Dropout(0.));
  }
  at::Tensor forward(at::Tensor x) { return dropout(w2(gelu(w1(x)))); }
  nn::Linear w1{nullptr}, w2{nullptr};
  nn::GELU gelu{nullptr};
  nn::Dropout dropout{nullptr};
};
TESSERA_MODULE(FeedForward);

/// 14 modules: itself, two norms, 6 of attention and 5 of the feed-forward part.
struct TransformerLayerImpl : torch::nn::Module {
  TransformerLayerImpl() {
    attention_norm = register_module("attention_norm", nn::LayerNorm(torch::nn::LayerNormOptions({kDim})));
    attention = register_module("attention", Attention());
    ffn_norm = register_module("ffn_norm", nn::LayerNorm(torch::nn::LayerNormOptions({kDim})));
    feed_forward = register_module("feed_forward", FeedForward());
  }
  at::Tensor forward(at::Tensor x) {
    x = x + attention(attention_norm(x));
    return x + feed_forward(ffn_norm(x));
  }
  nn::LayerNorm attention_norm{nullptr}, ffn_norm{nullptr};
  Attention attention{nullptr};
  FeedForward feed_forward{nullptr};
};
TESSERA_MODULE(TransformerLayer);

/// 7 modules and 14 a layer: itself, two embeddings, the dropout, the list of layers, the norm and the output.
struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(int num_layers) {
    tokens = register_module("tok_embeddings", nn::Embedding(kVocabulary, kDim));
    positions = register_module("pos_embeddings", nn::Embedding(kLength, kDim));
    dropout = register_module("dropout", nn::Dropout(0.));
    torch::nn::ModuleList list;
    for (int i = 0; i < num_layers; ++i) {
      layers.emplace_back();
      list->push_back(layers.back());
    }
    register_module("layers", list);
    norm = register_module("norm", nn::LayerNorm(torch::nn::LayerNormOptions({kDim})));
    output = register_module("output", linear(kDim, kVocabulary, false));
  }
  at::Tensor forward(at::Tensor ids) {
    auto x = dropout(tokens(ids) + positions(at::arange(ids.size(1))));
    for (auto& layer : layers) {
      x = layer(x);
    }
    return output(norm(x));
  }
  nn::Embedding tokens{nullptr}, positions{nullptr};
  nn::Dropout dropout{nullptr};
  std::vector<TransformerLayer> layers;
  nn::LayerNorm norm{nullptr};
  nn::Linear output{nullptr};
};
TESSERA_MODULE(Transformer);

struct ThreeLayersImpl : torch::nn::Module {
  ThreeLayersImpl() {
    fc1 = register_module("fc1", nn::Linear(2, 2));
    fc2 = register_module("fc2", nn::Linear(2, 2));
    fc3 = register_module("fc3", nn::Linear(2, 2));
  }
  at::Tensor forward(at::Tensor x) { return fc3(at::relu(fc2(at::relu(fc1(x))))); }
  nn::Linear fc1{nullptr}, fc2{nullptr}, fc3{nullptr};
};
TESSERA_MODULE(ThreeLayers);

at::Tensor token_ids(uint64_t seed) {
  return make_batch(seed, 2, 6).mul(100).abs().to(at::kLong).remainder(kVocabulary);
}

/// {replicate: 2, shard: 1, tp: 2}
DeviceMesh mesh_of_four() {
  return init_device_mesh(at::kCPU, {2, 1, 2}, {"replicate", "shard", "tp"});
}

using Apis = std::vector<std::string>;

/// Every other layer replicated, the rest sharded, and the root either way.
void make_parallel(Transformer& model, const DeviceMesh& mesh, bool root_replicates) {
  for (size_t i = 0; i < model->layers.size(); ++i) {
    i % 2 == 0 ? replicate(model->layers[i], {.mesh = mesh}) : fully_shard(model->layers[i], {.mesh = mesh});
  }
  root_replicates ? replicate(model, {.mesh = mesh}) : fully_shard(model, {.mesh = mesh});
}

}  // namespace

TEST_CASE("row 117: each module tells the API that it has, and its parameters lie accordingly", "[composability]") {
  const bool root_replicates = GENERATE(true, false);
  run_ranks(4, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {4}, {"dp"});
    Transformer model(2);
    expect_equal(composable_apis(model), Apis{});
    make_parallel(model, mesh, root_replicates);
    expect_equal(composable_apis(model->layers[0]), Apis{"replicate"});
    expect_equal(composable_apis(model->layers[1]), Apis{"fully_shard"});
    expect_equal(composable_apis(model), Apis{root_replicates ? "replicate" : "fully_shard"});
    expect_equal(composable_apis(model->layers[0]->attention), Apis{});
    for (const auto& param : model->layers[0]->parameters()) {
      expect_equal(placements(param), Placements{Replicate()});
    }
    for (const auto& param : model->layers[1]->parameters()) {
      expect_equal(placements(param), Placements{Shard(0)});
    }
    const auto of_root = root_replicates ? Placements{Replicate()} : Placements{Shard(0)};
    expect_equal(placements(model->tokens->weight), of_root);
    expect_equal(placements(model->output->weight), of_root);
  });
}

TEST_CASE("row 117: a transformer with both APIs trains as in one process", "[composability]") {
  const bool root_replicates = GENERATE(true, false);
  run_ranks(4, [&](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {4}, {"dp"});
    Transformer reference(2), model(2);
    fill_parameters(*reference, 42);
    fill_parameters(*model, 42);
    make_parallel(model, mesh, root_replicates);
    torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2));
    torch::optim::Adam reference_optimizer(reference->parameters(), torch::optim::AdamOptions(1e-2));
    for (uint64_t step = 0; step < 10; ++step) {
      const auto loss_of = [&](Transformer& of, int r) { return weighted_loss(of(token_ids(4 * step + r))); };
      at::Tensor expected;
      average_reference(*reference, 4, [&](int r) {
        auto loss = loss_of(reference, r);
        expected = r == rank ? loss.detach() : expected;
        loss.backward();
      });
      optimizer.zero_grad();
      auto loss = loss_of(model, rank);
      loss.backward();
      TESSERA_EXPECT(loss.item<float>() != 0);
      expect_bit_equal(loss.detach(), expected);
      check_sharded_parity(reference, model, {.tolerance = {.rtol = 0, .atol = 0}});
      optimizer.step();
      reference_optimizer.step();
      check_sharded_parity(reference, model, {.tolerance = {.rtol = 0, .atol = 0}});
    }
  });
}

TEST_CASE("row 117: a call takes the modules that no call below it took", "[composability]") {
  run_ranks(4, [](int) {
    const auto mesh = mesh_of_four();
    Transformer model(3);
    expect_equal(managed_modules(model).size(), 49u);  // 7 + 3 x 14
    expect_equal(managed_modules(model->layers[0]).size(), 14u);
    expect_equal(managed_modules(model->layers[1]).size(), 14u);
    replicate(model->layers[0], {.mesh = mesh["replicate"]});
    fully_shard(model->layers[1], {.mesh = mesh["shard"]});
    expect_equal(managed_modules(model).size(), 21u);  // 7 + 14
    expect_equal(managed_modules(model->layers[0]).size(), 14u);
    const auto managed = managed_modules(model);
    TESSERA_EXPECT(managed[0] == model.ptr().get());
    const auto is_managed = [&](const torch::nn::Module& module) {
      return std::find(managed.begin(), managed.end(), &module) != managed.end();
    };
    TESSERA_EXPECT(!is_managed(*model->layers[0]) && !is_managed(*model->layers[1]->attention->wq));
    TESSERA_EXPECT(is_managed(*model->layers[2]->attention->wq) && is_managed(*model->output));
  });
}

TEST_CASE("row 118: replicate over one axis of a mesh gives parameters on that axis alone", "[composability]") {
  run_ranks(4, [](int) {
    const auto mesh = mesh_of_four();
    Transformer model(2);
    replicate(model->layers[0], {.mesh = mesh["replicate"]});
    replicate(model, {.mesh = mesh["replicate"]});
    for (const auto& param : model->parameters()) {
      expect_equal(device_mesh(param).shape(), std::vector<int64_t>{2});
      TESSERA_EXPECT(device_mesh(param) == mesh["replicate"]);
      expect_equal(placements(param), Placements{Replicate()});
    }
    // A slice of two names.
    Transformer hybrid(2);
    const auto both = mesh[{"replicate", "shard"}];
    fully_shard(hybrid, {.mesh = both});
    for (const auto& param : hybrid->parameters()) {
      expect_equal(device_mesh(param).shape(), std::vector<int64_t>{2, 1});
      TESSERA_EXPECT(device_mesh(param) == both);
      expect_equal(placements(param), Placements{Replicate(), Shard(0)});
    }
  });
}

namespace {

/// Takes ten steps of Adam, and expects the losses, gradients and parameters of one process in each.
void train_three_layers(int rank, const std::function<void(ThreeLayers&)>& make_units) {
  ThreeLayers reference, net;
  fill_parameters(*reference, 42);
  fill_parameters(*net, 42);
  make_units(net);
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01));
  torch::optim::Adam reference_optimizer(reference->parameters(), torch::optim::AdamOptions(0.01));
  const auto input = [](int r) { return make_batch(static_cast<uint64_t>(42 + r + 1), 2, 2); };
  for (int step = 0; step < 10; ++step) {
    at::Tensor expected;
    average_reference(*reference, 4, [&](int r) {
      auto loss = weighted_loss(reference(input(r)));
      expected = r == rank ? loss.detach() : expected;
      loss.backward();
    });
    optimizer.zero_grad();
    auto loss = weighted_loss(net(input(rank)));
    loss.backward();
    TESSERA_EXPECT(loss.item<float>() != 0);
    expect_bit_equal(loss.detach(), expected);
    check_sharded_parity(reference, net, {.tolerance = {.rtol = 0, .atol = 0}});
    for (const auto& param : net->parameters()) {
      TESSERA_EXPECT(full_tensor(param.grad()).abs().sum().item<float>() > 0);
    }
    if (step == 0) {  // the mean over the ranks, of replicated layers as of sharded ones, not the sum
      ThreeLayers sum;
      fill_parameters(*sum, 42);
      for (int r = 0; r < 4; ++r) {
        weighted_loss(sum(input(r))).backward();
      }
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        expect_close(full_tensor(net->parameters()[i].grad()) * 4, sum->parameters()[i].grad());
      }
    }
    optimizer.step();
    reference_optimizer.step();
    check_sharded_parity(reference, net, {.tolerance = {.rtol = 0, .atol = 0}});
  }
}

}  // namespace

TEST_CASE("row 119: a net whose layers and root are all replicated trains as in one process", "[composability]") {
  run_ranks(4, [](int rank) {
    train_three_layers(rank, [](ThreeLayers& net) {
      for (auto* layer : {&net->fc1, &net->fc2, &net->fc3}) {
        replicate(*layer);
        expect_equal(composable_apis(*layer), Apis{"replicate"});
      }
      replicate(net);
      for (const auto& param : net->parameters()) {
        expect_equal(placements(param), Placements{Replicate()});
      }
    });
  });
}

TEST_CASE("row 119: a net of replicated and sharded layers trains as in one process", "[composability]") {
  run_ranks(4, [](int rank) {
    train_three_layers(rank, [](ThreeLayers& net) {
      replicate(net->fc1);
      fully_shard(net->fc2);
      replicate(net);
    });
  });
}

TEST_CASE("one module has one of both APIs, once", "[composability]") {
  run_ranks(2, [](int) {
    ThreeLayers net;
    replicate(net->fc1);
    fully_shard(net->fc2);
    expect_throws<StateError>([&] { fully_shard(net->fc1); },
                              "fully_shard(torch::nn::LinearImpl): torch::nn::LinearImpl is a unit already, of "
                              "replicate; a module has one of fully_shard and replicate, once");
    expect_throws<StateError>([&] { replicate(net->fc2); },
                              "replicate(torch::nn::LinearImpl): torch::nn::LinearImpl is a unit already, of "
                              "fully_shard; a module has one of fully_shard and replicate, once");
    expect_throws<StateError>([&] { replicate(net->fc1); }, "is a unit already, of replicate");
    expect_equal(composable_apis(net->fc1), Apis{"replicate"});
    fully_shard({&*net->fc3, &*net});
    expect_equal(composable_apis(net->fc3), Apis{"fully_shard"});
    expect_equal(composable_apis(net), Apis{"fully_shard"});
  });
}

}  // namespace tessera::testing
