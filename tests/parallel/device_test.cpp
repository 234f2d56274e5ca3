// Tensor, sequence and context parallelism on every device that there is, each rank on a stream of its own.

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include "activation_checkpoint/checkpoint.h"
#include "fully_shard/fully_shard.h"
#include "nn/linear.h"
#include "nn/normalization.h"
#include "parallel/experimental/context_parallel.h"
#include "parallel/linear_styles.h"
#include "parallel/parallelize_module.h"
#include "parallel/sequence_parallel.h"
#include "parallel/sync_batch_norm.h"
#include "testing/expect.h"
#include "testing/tensor_matchers.h"
#include "testing/test_devices.h"
#include "tests/parallel/llama.h"
#include "tests/parallel/tp_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

template <class Model>
void compare_models(Model& reference, Model& sharded, const at::Tensor& input,
                    const std::function<at::Tensor(const at::Tensor&)>& loss = weighted_loss) {
  train_and_compare({.reference = *reference,
                     .sharded = *sharded,
                     .run_reference = [&](const at::Tensor& x) { return reference(x); },
                     .run_sharded = [&](const at::Tensor& x) { return whole(sharded(x)); },
                     .loss = loss},
                    input);
}

}  // namespace

TEST_CASE("devices: a LLaMA-style model under tensor and sequence parallelism equals one process", "[parallel]") {
  const int ranks = GENERATE(2, 3);
  const auto config =
      GENERATE(LlamaConfig{.heads = 6, .kv_heads = 3, .layers = 1}, LlamaConfig{.heads = 5, .kv_heads = 1});
  run_ranks_on_devices(ranks, [&](int /*rank*/, c10::Device device) {
    auto reference = make_llama(config, device), sharded = make_llama(config, device);
    parallelize_module(sharded, init_device_mesh(device.type(), {ranks}, {"tp"}), llama_plan());
    compare_models(reference, sharded, make_tokens(4, 7, device), token_loss);
  });
}

TEST_CASE("devices: data parallelism over tensor parallelism, blocks computed again, equals one process",
          "[parallel]") {
  run_ranks_on_devices(4, [](int /*rank*/, c10::Device device) {
    const auto mesh = init_device_mesh(device.type(), {2, 2}, {"dp", "tp"});
    auto reference = make_llama({.layers = 2}, device), sharded = make_llama({.layers = 2}, device);
    parallelize_module(sharded, mesh["tp"], llama_plan());
    for (auto& block : sharded->blocks) {
      checkpoint_module(*block);
      fully_shard(block, {.mesh = mesh["dp"]});
    }
    fully_shard(sharded, {.mesh = mesh["dp"]});
    compare_models(reference, sharded, make_tokens(4, 7, device), token_loss);
  });
}

TEST_CASE("devices: a plain input on another device than the mesh's is refused by name", "[parallel]") {
  run_ranks_on_devices(2, [](int /*rank*/, c10::Device device) {
    if (device.is_cpu()) {
      return;
    }
    tessera::nn::Linear layer(4, 4);
    layer->to(device);
    parallelize_module(layer, init_device_mesh(device.type(), {2}, {"tp"}), ColwiseParallel());
    const auto text = error_text([&] { layer(at::ones({2, 4})); });
    TESSERA_EXPECT(
        text.starts_with("ColwiseParallel(the module itself): a plain input is on cpu, but the style works "
                         "on DeviceMesh("));
  });
}

TEST_CASE("devices: batch norms over the batches of all ranks equal one process", "[parallel]") {
  run_ranks_on_devices(3, [](int rank, c10::Device device) {
    nn::BatchNorm1d reference(4), layer(4);
    for (auto* each : {&reference, &layer}) {
      fill_in_double(**each, 42);
      (*each)->to(device);
    }
    convert_sync_batchnorm(layer, init_device_mesh(device.type(), {3}, {"dp"}));
    for (uint64_t step = 0; step < 2; ++step) {
      const auto own = [rank](const at::Tensor& all) { return all.narrow(0, rank * (rank + 1) / 2, rank + 1); };
      const auto all = make_input(step, {6, 4, 3}).to(device).set_requires_grad(true);
      const auto x = own(all.detach()).clone().set_requires_grad(true);
      const auto weights = make_input(10 + step, {6, 4, 3}).to(device);
      const auto expected = reference(all), y = layer(x);
      expect_close(y, own(expected), kDoubleTolerance);
      (expected * weights).sum().backward();
      (y * own(weights)).sum().backward();
      expect_close(x.grad(), own(all.grad()), kDoubleTolerance);
    }
    expect_close(layer->running_mean, reference->running_mean, kDoubleTolerance);
    expect_close(layer->running_var, reference->running_var, kDoubleTolerance);
  });
}

TEST_CASE("devices: attention over a cut sequence equals that of one process", "[parallel]") {
  const bool causal = GENERATE(false, true);
  run_ranks_on_devices(3, [&](int /*rank*/, c10::Device device) {
    const auto mesh = init_device_mesh(device.type(), {3}, {"cp"});
    std::vector<at::Tensor> whole_inputs, inputs;
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      whole_inputs.push_back(make_input(seed, {2, 2, 8, 4}).to(device).set_requires_grad(true));
      inputs.push_back(distribute_tensor(whole_inputs.back(), mesh, {Shard(2)}));
    }
    const auto expected =
        at::scaled_dot_product_attention(whole_inputs[0], whole_inputs[1], whole_inputs[2], {}, 0.0, causal);
    weighted_loss(expected).backward();
    const auto out = context_parallel_attention(inputs[0], inputs[1], inputs[2], {.is_causal = causal});
    expect_close(full_tensor(out).detach(), expected.detach(), kDoubleTolerance);
    weighted_loss(full_tensor(out)).backward();
    for (size_t i = 0; i < inputs.size(); ++i) {
      expect_close(full_tensor(inputs[i].grad()), whole_inputs[i].grad(), kDoubleTolerance);
    }
  });
}

}  // namespace tessera::testing
