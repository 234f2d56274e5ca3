// What a rank allocates while from_pretrained reads a folder, and what a step keeps, counted below libtorch.

#include <ATen/ops/arange.h>

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "models/pretrained.h"
#include "testing/count_allocations.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// Of 4 MB each, the largest tensors are the matrices of MLPs and experts.
models::DecoderConfig large_config(const std::string& family) {
  models::DecoderConfig config{.model_type = family,
                               .vocab_size = 500,
                               .hidden_size = 512,
                               .intermediate_size = 2048,
                               .num_hidden_layers = 3,
                               .num_attention_heads = 8,
                               .num_key_value_heads = 8,
                               .head_dim = 64,
                               .max_position_embeddings = 32,
                               .attention_scale = 0.125,
                               .tie_word_embeddings = true};
  if (family == "mixtral") {
    config.moe = {.num_experts = 3, .num_experts_per_tok = 2, .intermediate_size = 2048};
    config.num_hidden_layers = 2;
  }
  if (family == "gpt2") {  // whose matrices are transposed in the files
    config.norm = models::NormKind::Layer;
    config.rotary.reset();
    config.query_bias = config.output_bias = config.mlp_bias = true;
    config.activation = models::Activation::TanhGelu;
    config.gated_mlp = false;
  }
  return config;
}

struct Sizes {
  int64_t all = 0;
  int64_t largest = 0;  // stored tensor
};

Sizes sizes_of(const models::Decoder& model) {
  Sizes sizes;
  for (const auto& item : model->named_parameters()) {
    const auto bytes = static_cast<int64_t>(item.value().nbytes());
    sizes.all += bytes;
    sizes.largest = std::max(sizes.largest, item.value().dim() == 3 ? bytes / item.value().size(0) : bytes);
  }
  return sizes;
}

}  // namespace

TEST_CASE("loading takes a rank's shards and at most two tensors") {
  const std::string family = GENERATE("llama", "mixtral", "gpt2");
  const int world_size = GENERATE(2, 4);
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16);  // of the files
  const TempFolder folder;
  Sizes sizes;
  {
    models::Decoder model(large_config(family));
    sizes = sizes_of(model);
    model->to(dtype);
    models::save_pretrained(model, folder.path("model"));
  }
  const CountAllocations counting;
  std::vector<std::unique_ptr<AllocationCounter>> counters;
  for (int rank = 0; rank < world_size; ++rank) {
    counters.push_back(std::make_unique<AllocationCounter>());
  }
  run_ranks(world_size, [&](int rank) {
    const CountingScope scope(*counters[static_cast<size_t>(rank)]);
    const auto mesh = init_device_mesh(at::kCPU, {world_size}, {"dp"});
    models::from_pretrained(folder.path("model"), {.mesh = mesh, .dtype = at::kFloat});
  });
  for (const auto& counter : counters) {
    const auto shards = static_cast<double>(sizes.all) / world_size;
    const auto more = (static_cast<double>(counter->peak) - shards) / static_cast<double>(sizes.largest);
    CAPTURE(family, world_size, dtype, shards, more);
    CHECK(static_cast<double>(counter->peak) > 0.99 * shards);
    CHECK(more < 2.01);  // and some bytes
  }
}

TEST_CASE("what is recomputed is not kept, from nothing over cheap results to all") {
  const CountAllocations counting;
  std::map<models::Recompute, int64_t> peaks;
  for (const auto recompute : {models::Recompute::None, models::Recompute::Selective, models::Recompute::Full}) {
    AllocationCounter own;
    run_ranks(1, [&](int) {
      models::Decoder model(large_config("llama"));
      models::lay_out(model, init_device_mesh(at::kCPU, {1}, {"dp"}), {.recompute = recompute});
      const auto ids = at::arange(32).repeat({8, 1});
      const CountingScope scope(own);
      const auto loss = models::next_token_loss(model(ids), ids);
      peaks[recompute] = own.bytes;
      loss.backward();
    });
  }
  const auto none = peaks[models::Recompute::None], some = peaks[models::Recompute::Selective],
             all = peaks[models::Recompute::Full];
  CAPTURE(none, some, all);
  CHECK(some < 0.8 * static_cast<double>(none));
  CHECK(all < 0.5 * static_cast<double>(some));
}

}  // namespace tessera::testing
