// A LLaMA-style model under tensor and sequence parallelism against one process.

#include "tests/parallel/llama.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cross_entropy_loss.h>

#include "debug/comm_debug_mode.h"
#include "parallel/loss_parallel.h"
#include "parallel/parallelize_module.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "tests/parallel/tp_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

void train_llama(const LlamaConfig& config, int ranks) {
  run_ranks(ranks, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {ranks}, {"tp"});
    auto reference = make_llama(config), sharded = make_llama(config);
    parallelize_module(sharded, mesh, llama_plan());
    train_and_compare({.reference = *reference,
                       .sharded = *sharded,
                       .run_reference = [&](const at::Tensor& x) { return reference(x); },
                       .run_sharded = [&](const at::Tensor& x) { return sharded(x); },
                       .loss = token_loss},
                      make_tokens(4, 7));
  });
}

}  // namespace

TEST_CASE("a model whose heads divide by the ranks", "[parallel]") {
  train_llama({.heads = 4, .kv_heads = 2}, 1);
  train_llama({.heads = 4, .kv_heads = 2}, 2);
  train_llama({.heads = 6, .kv_heads = 3}, 3);
  train_llama({.heads = 4, .kv_heads = 4}, 4);
}

TEST_CASE("heads that do not divide by the ranks", "[parallel]") {
  for (const int ranks : {2, 3, 4}) {
    train_llama({.heads = 6, .kv_heads = 2, .layers = 1}, ranks);
    train_llama({.heads = 5, .kv_heads = 1, .layers = 1}, ranks);
    train_llama({.heads = 3, .kv_heads = 3, .layers = 1}, ranks);
  }
  // Ranks without heads, words of the vocabulary and positions.
  train_llama({.heads = 6, .kv_heads = 2, .layers = 1}, 8);
}

TEST_CASE("what the model communicates", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    auto model = make_llama({});
    parallelize_module(model, mesh, llama_plan());
    const auto labels = make_tokens(5, 6);
    const LossParallel scope;
    at::Tensor loss;
    {
      CommDebugMode mode(*model);
      const auto logits = model(make_tokens(4, 6));
      // Embedding: a scatter. Each layer, attention and feed-forward: a gather and a scatter. Output: a gather.
      expect_equal(mode.calls(Collective::AllGather), 2 * 2 + 1);
      expect_equal(mode.calls(Collective::ReduceScatter), 2 * 2 + 1);
      expect_equal(mode.calls(), 10);
      loss = at::cross_entropy_loss(logits.flatten(0, 1), labels.flatten());
      expect_equal(mode.calls(Collective::AllReduce), 2);  // maxima and sums of the rows
      expect_equal(mode.calls(), 12);
    }
    CommDebugMode mode;
    loss.backward();
    expect_equal(mode.calls(Collective::AllGather), 2 * 2 + 1);
    expect_equal(mode.calls(Collective::ReduceScatter), 2 * 2 + 1);
    expect_equal(mode.calls(Collective::AllReduce), 1 + 5);  // the loss, and the weights of five norms
    expect_equal(mode.calls(), 16);
  });
}

}  // namespace tessera::testing
