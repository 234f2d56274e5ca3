#include "models/moe.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

#include "base/error.h"
#include "debug/comm_debug_mode.h"
#include "dtensor/dtensor.h"
#include "models/decoder_layout.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

models::DecoderConfig moe_config(int64_t experts, int64_t per_token) {
  return {.model_type = "mixtral",
          .vocab_size = 20,
          .hidden_size = 12,
          .intermediate_size = 14,
          .num_hidden_layers = 2,
          .num_attention_heads = 2,
          .num_key_value_heads = 2,
          .head_dim = 6,
          .max_position_embeddings = 8,
          .moe = models::MoeConfig{.num_experts = experts, .num_experts_per_tok = per_token, .intermediate_size = 14},
          .attention_scale = 1 / std::sqrt(6.0)};
}

/// Fills parameters, the same on all ranks.
void fill(torch::nn::Module& module) {
  auto generator = make_generator(5);
  const c10::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) {
    parameter.copy_(at::randn(parameter.sizes(), generator) * 0.4);
  }
}

/// Computes each token by itself, with all experts in turn.
at::Tensor reference_mix(models::Moe& moe, const at::Tensor& tokens) {
  auto out = at::zeros_like(tokens);
  const auto probabilities = at::linear(tokens, moe->router->weight).softmax(-1, at::kFloat);
  const auto [least, unused] = std::get<0>(probabilities.topk(moe->config.num_experts_per_tok, -1)).min(-1, true);
  const auto chosen = probabilities * probabilities.ge(least);
  const auto weights = (chosen / chosen.sum(-1, true)).to(at::kDouble);
  const auto& experts = moe->experts;
  for (int64_t expert = 0; expert < moe->config.num_experts; ++expert) {
    const auto gate = at::silu(at::linear(tokens, experts->gate_proj[expert]));
    const auto features = gate * at::linear(tokens, experts->up_proj[expert]);
    out = out + at::linear(features, experts->down_proj[expert]) * weights.select(1, expert).unsqueeze(1);
  }
  return out;
}

}  // namespace

TEST_CASE("a mixture of experts computes what all experts in turn compute") {
  for (const auto& [experts, per_token] : {std::pair<int64_t, int64_t>{1, 1}, {3, 2}, {5, 5}, {8, 2}}) {
    CAPTURE(experts, per_token);
    models::Moe moe(moe_config(experts, per_token)), expected(moe_config(experts, per_token));
    for (auto* each : {&moe, &expected}) {
      fill(**each);
      (*each)->to(at::kDouble);
    }
    const auto x = at::randn({2, 4, 12}, make_generator(6), at::kDouble);
    const auto mine = x.clone().set_requires_grad(true), theirs = x.clone().set_requires_grad(true);
    const auto out = moe(mine), reference = reference_mix(expected, theirs.flatten(0, 1)).view_as(x);
    expect_close(out, reference, {.rtol = 1e-5, .atol = 1e-5});
    out.square().sum().backward();
    reference.square().sum().backward();
    expect_close(mine.grad(), theirs.grad(), {.rtol = 1e-5, .atol = 1e-5});
    for (const auto& item : moe->named_parameters()) {
      CAPTURE(item.key());
      expect_close(item.value().grad(), expected->named_parameters()[item.key()].grad(), {.rtol = 1e-5, .atol = 1e-5});
    }
  }
}

TEST_CASE("experts that no token reaches get gradients of zero, on every rank") {
  const auto config = moe_config(7, 2);
  models::Decoder reference(config);
  fill(*reference);
  const auto all = at::arange(6).view({3, 2});
  models::next_token_loss(reference(all), all).backward();
  const auto reached = reference->layers[0]->moe->experts->up_proj.grad().abs().sum({1, 2}).ne(0);
  REQUIRE(reached.any().item<bool>());
  run_ranks(3, [&](int rank) {
    models::Decoder sharded(config);
    fill(*sharded);
    models::lay_out(sharded, init_device_mesh(at::kCPU, {3}, {"dp"}));
    const auto ids = all.narrow(0, rank, 1);  // 2 tokens for at most 4 of 7 experts
    models::next_token_loss(sharded(ids), ids).backward();
    for (const auto& item : sharded->named_parameters()) {
      expect_close(full_tensor(item.value().grad()), reference->named_parameters()[item.key()].grad());
    }
  });
}

TEST_CASE("what a mixture of experts communicates under tensor and expert parallelism") {
  run_ranks(2, [](int) {
    const auto calls_of = [](const models::DecoderLayout& layout) {
      auto config = moe_config(3, 1);
      config.num_hidden_layers = 1;
      models::Decoder model(config);
      models::lay_out(model, init_device_mesh(at::kCPU, {2}, {"tp"}), layout);
      const auto ids = at::arange(8).unsqueeze(0);
      const CommDebugMode mode(*model);
      models::next_token_loss(model(ids), ids).backward();
      return std::array{mode.calls(Collective::AllReduce), mode.calls(Collective::AllGather),
                        mode.calls(Collective::ReduceScatter), mode.calls(Collective::AllToAll)};
    };
    // As a dense layer, and the router's gradient.
    expect_equal(calls_of({}), std::array<int64_t, 4>{3 + 3 + 1, 1, 0, 0});
    expect_equal(calls_of({.sequence_parallel = true}), std::array<int64_t, 4>{3 + 1, 3 + 3 + 1, 3 + 3, 0});
    // The layer's pairs become all-to-alls; two gathers agree on what is sent.
    expect_equal(calls_of({.sequence_parallel = true, .expert_parallel = true}),
                 std::array<int64_t, 4>{3 + 1, 2 + 2 + 1 + 2, 2 + 2, 4});
  });
}

TEST_CASE("the load-balancing loss is least where all experts are used alike") {
  const auto even = at::zeros({4, 4}), one = at::zeros({4, 4});
  for (int64_t token = 0; token < 4; ++token) {
    even[token][token] = 20;
    one[token][0] = 20;
  }
  expect_close(models::load_balancing_loss({even}, 1), at::ones({}), {.rtol = 1e-6});
  expect_close(models::load_balancing_loss({one}, 1), 4 * at::ones({}), {.rtol = 1e-6});
  expect_close(models::load_balancing_loss({even, one}, 1), 1.75 * at::ones({}), {.rtol = 1e-6});  // of all layers
}

TEST_CASE("router logits are kept if the config says so, for one loss") {
  auto config = moe_config(3, 2);
  models::Decoder silent(config);
  const auto ids = at::arange(8).unsqueeze(0);
  silent(ids);
  CHECK(!silent->layers[0]->moe->router_logits.defined());
  expect_throws<StateError>([&] { models::router_aux_loss(silent); }, "the model keeps no router logits");
  config.moe->output_router_logits = true;
  config.moe->router_aux_loss_coef = 0.5;
  models::Decoder model(config);
  expect_throws<StateError>([&] { models::router_aux_loss(model); }, "there was no forward");
  model(ids);
  const std::vector<at::Tensor> logits{model->layers[0]->moe->router_logits, model->layers[1]->moe->router_logits};
  const auto loss = models::router_aux_loss(model);
  expect_close(loss, 0.5 * models::load_balancing_loss(logits, 2));
  expect_throws<StateError>([&] { models::router_aux_loss(model); }, "there was no forward");
}

}  // namespace tessera::testing
