// What a rank allocates while from_pretrained reads a folder, counted below libtorch.

#include <algorithm>
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

}  // namespace tessera::testing
