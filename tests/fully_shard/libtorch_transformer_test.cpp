// libtorch's transformer with a unit for each of its layers.

#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <torch/optim/sgd.h>

#include "dtensor/random/random.h"
#include "fully_shard/fully_shard.h"
#include "nn/transformer.h"
#include "testing/fixtures.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

/// [length, items, dim], of all ranks; rank r has items r, r + ranks, ...
at::Tensor global_batch(uint64_t step, int64_t length, int64_t items) {
  const auto generator = new_generator(at::kCPU, step);
  return at::randn({length, items, 6}, generator, at::kDouble);
}

nn::Transformer make_transformer() {
  nn::Transformer transformer(torch::nn::TransformerOptions(6, 3, 2, 2).dim_feedforward(10).dropout(0));
  fill_parameters(*transformer, 3);
  transformer->to(at::kDouble);
  return transformer;
}

/// Of the items first, first + stride, ...: their mean, so that the mean over ranks is that of all.
at::Tensor loss_of(nn::Transformer& model, uint64_t step, int64_t first, int64_t stride) {
  constexpr int64_t kItems = 6;
  const auto own = [&](const at::Tensor& all) { return all.slice(1, first, std::nullopt, stride); };
  const at::Tensor squares =
      model(own(global_batch(step, 5, kItems)), own(global_batch(step + 100, 4, kItems))).square();
  return squares.sum() / squares.size(1);
}

TEST_CASE("a transformer of libtorch trains with a unit a layer as in one process") {
  const int world_size = GENERATE(1, 2, 3);
  const bool reshard_after_forward = GENERATE(true, false);
  run_ranks(world_size, [&](int rank) {
    auto reference = make_transformer(), model = make_transformer();
    const FullyShardOptions options{.reshard_after_forward = reshard_after_forward};
    for (const auto& layer : *model->encoder.get<nn::TransformerEncoder::Impl>().layers) {
      fully_shard(*layer, options);
    }
    for (const auto& layer : *model->decoder.get<nn::TransformerDecoder::Impl>().layers) {
      fully_shard(*layer, options);
    }
    fully_shard(model, options);
    // No Adam: the gradient of the bias of keys is zero but for rounding, which Adam would make steps of.
    torch::optim::SGD optimizer(model->parameters(), 0.01), reference_optimizer(reference->parameters(), 0.01);
    for (uint64_t step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      reference_optimizer.zero_grad();
      loss_of(model, step, rank, world_size).backward();
      loss_of(reference, step, 0, 1).backward();
      check_sharded_parity(reference, model, {.tolerance = {.rtol = 1e-8, .atol = 1e-9}});
      optimizer.step();
      reference_optimizer.step();
    }
  });
}

}  // namespace
}  // namespace tessera::testing
