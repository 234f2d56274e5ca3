// Compares models with those of Python's transformers: logits, loss and every gradient of many configs, on one rank and
// sharded, and what transformers reads of the folders that we save.

#include <ATen/TensorOperators.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>

#include "checkpoint/checkpoint.h"
#include "dtensor/dtensor.h"
#include "models/pretrained.h"
#include "models/weight_names.h"
#include "testing/expect.h"
#include "testing/peer_python.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr double kTolerance = 1e-5;

bool run_transformers(const std::string& arguments) {
  return run_peer_python("safetensors", "tests/models/transformers_peer.py", arguments);
}

/// Folder with the models that Python has made, once for all test cases; "" without Python.
const std::string& transformers_folder() {
  static const TempFolder folder;
  // For what Python compiles of transformers, so that the second run starts sooner: a sandbox can write nowhere else.
  setenv("PYTHONPYCACHEPREFIX", folder.path("compiled").c_str(), 1);
  static const std::string path = run_transformers("write " + folder.path()) ? folder.path() : "";
  return path;
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(transformers_folder() + "/models")) {
    names.push_back(entry.path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

double largest(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? 0 : tensor.abs().max().item<double>();
}

/// What Python has computed, by name.
using Expected = std::map<std::string, at::Tensor>;

Expected read_expected(const std::string& name, const models::Decoder& model) {
  dcp::State state{.model = {{"ids", at::Tensor()}, {"logits", at::Tensor()}, {"loss", at::Tensor()}}};
  for (const auto& item : model->named_parameters()) {
    state.model["grad." + models::weight_source(model->config.model_type, item.key()).key] = at::Tensor();
  }
  dcp::load(transformers_folder() + "/expected/" + name + ".safetensors", state);  // strict: all gradients are here
  Expected expected;
  for (const auto& [key, value] : state.model) {
    expected[key] = std::get<at::Tensor>(value);
  }
  return expected;
}

/// Largest differences, relative to the largest element.
struct Differences {
  double logits = 0;
  double loss = 0;
  double gradients = 0;

  void include(const Differences& other) {
    logits = std::max(logits, other.logits);
    loss = std::max(loss, other.loss);
    gradients = std::max(gradients, other.gradients);
  }
  void expect_small(const std::string& name) const {
    if (!(logits <= kTolerance && loss <= kTolerance && gradients <= kTolerance)) {
      throw ExpectationError(fmt::format("{}: relative differences of logits {:.1e}, loss {:.1e}, gradients {:.1e}",
                                         name, logits, loss, gradients));
    }
  }
};

/// Relative to the stored tensor's largest gradient, and where that vanishes to a thousandth of the model's.
double gradient_difference(const models::Decoder& model, const Expected& expected) {
  double most = 0, worst = 0;
  for (const auto& [key, value] : expected) {
    most = key.starts_with("grad.") ? std::max(most, largest(value)) : most;
  }
  for (const auto& item : model->named_parameters()) {
    TESSERA_EXPECT(item.value().grad().defined());
    const auto source = models::weight_source(model->config.model_type, item.key());
    const auto& stored = expected.at("grad." + source.key);
    const auto part = (source.is_transposed ? stored.t() : stored).chunk(source.parts, 0)[source.part];
    const double difference = largest(full_tensor(item.value().grad()) - part);
    worst = std::max(worst, difference / std::max(largest(stored), 1e-3 * most));
  }
  return worst;
}

/// Runs a step on `rows` of the batch. Losses are compared only if these are all.
Differences step_difference(models::Decoder& model, const Expected& expected, const at::Tensor& rows) {
  const auto ids = expected.at("ids").index_select(0, rows);
  const auto logits = expected.at("logits").index_select(0, rows);
  const auto own = model(ids);
  const auto loss = models::next_token_loss(own, ids);
  loss.backward();
  Differences differences{.logits = largest(own - logits) / largest(logits)};
  if (rows.size(0) == expected.at("ids").size(0)) {
    differences.loss = std::abs(loss.item<double>() / expected.at("loss").item<double>() - 1);
  }
  differences.gradients = gradient_difference(model, expected);
  return differences;
}

/// Mesh of ranks, and how a model is laid out on it.
struct Sharding {
  std::string name;
  std::vector<int64_t> sizes;  // of dp, and tp if there are two
  models::DecoderLayout layout = {};

  int ranks() const { return static_cast<int>(sizes.size() == 1 ? sizes[0] : sizes[0] * sizes[1]); }
};

models::Decoder load_sharded(const std::string& name, const Sharding& sharding) {
  const auto axes = sharding.sizes.size() == 1 ? std::vector<std::string>{"dp"} : std::vector<std::string>{"dp", "tp"};
  return models::from_pretrained(
      transformers_folder() + "/models/" + name,
      {.mesh = init_device_mesh(at::kCPU, sharding.sizes, axes), .layout = sharding.layout, .dtype = at::kFloat});
}

/// What is special on several ranks: fused and tied weights, windows, norms of heads, and heads that the ranks of tp do
/// not divide (three in gpt2.epsilon, one key in llama.one_key).
const std::vector<std::string> kShardedModels = {
    "gpt2.plain",   "gpt2.epsilon",   "llama.plain", "llama.tied",   "llama.padding_tied", "llama.one_key",
    "llama.biases", "mistral.window", "qwen2.tied",  "qwen3.window", "gemma2.plain",       "gemma3_text.plain",
};

const std::vector<Sharding> kShardings = {
    {.name = "fully_shard over 2", .sizes = {2}},
    {.name = "fully_shard over 3", .sizes = {3}, .layout = {.recompute = models::Recompute::Full}},
    {.name = "2 x tp 2", .sizes = {2, 2}},
    {.name = "2 x tp 2, sequence parallel",
     .sizes = {2, 2},
     .layout = {.sequence_parallel = true, .recompute = models::Recompute::Full}},
};

}  // namespace

TEST_CASE("decoders compute what transformers computes") {
  if (transformers_folder().empty()) {
    return;
  }
  const auto names = model_names();
  REQUIRE(names.size() >= 60);
  Differences worst;
  for (const auto& name : names) {
    auto model = models::from_pretrained(transformers_folder() + "/models/" + name, {.dtype = at::kFloat});
    const auto differences = step_difference(model, read_expected(name, model), at::arange(2));
    differences.expect_small(name);
    worst.include(differences);
  }
  fmt::print("{} models: largest relative differences of logits {:.1e}, loss {:.1e}, gradients {:.1e}\n", names.size(),
             worst.logits, worst.loss, worst.gradients);
}

TEST_CASE("sharded decoders compute what transformers computes") {
  if (transformers_folder().empty()) {
    return;
  }
  for (const auto& sharding : kShardings) {
    run_ranks(sharding.ranks(), [&](int rank) {
      Differences worst;
      for (const auto& name : kShardedModels) {
        auto model = load_sharded(name, sharding);
        const auto& mesh = device_mesh(model->layers[0]->mlp->up_proj->weight);
        // Two ranks of dp have a row each, whose gradients are averaged; others have the whole batch.
        const int64_t dp_rank = rank / (sharding.ranks() / sharding.sizes[0]);
        const auto rows = sharding.sizes[0] == 2 ? at::arange(dp_rank, dp_rank + 1) : at::arange(2);
        TESSERA_EXPECT(mesh.size() == sharding.ranks());
        const auto differences = step_difference(model, read_expected(name, model), rows);
        differences.expect_small(fmt::format("{}, {}", name, sharding.name));
        worst.include(differences);
      }
      if (rank == 0) {
        fmt::print("{}: largest relative differences of logits {:.1e}, gradients {:.1e}\n", sharding.name, worst.logits,
                   worst.gradients);
      }
    });
  }
}

TEST_CASE("transformers opens the folders that decoders are saved to") {
  if (transformers_folder().empty()) {
    return;
  }
  std::filesystem::create_directory(transformers_folder() + "/saved");
  const auto target = [](const std::string& name) { return transformers_folder() + "/saved/" + name; };
  for (const auto& sharding : {kShardings[1], kShardings[2]}) {
    run_ranks(sharding.ranks(), [&](int) {
      for (size_t i = sharding.ranks() % 2; i < kShardedModels.size(); i += 2) {
        auto model = load_sharded(kShardedModels[i], sharding);
        models::save_pretrained(model, target(kShardedModels[i]));
      }
    });
  }
  for (const auto& name : model_names()) {
    if (!std::filesystem::exists(target(name))) {
      auto model = models::from_pretrained(transformers_folder() + "/models/" + name, {.dtype = at::kFloat});
      models::save_pretrained(model, target(name), {.max_file_bytes = 10'000});
    }
  }
  CHECK(read_file(target("llama.plain") + "/tokenizer_config.json") == R"({"made_by": "the test"})");
  REQUIRE(run_transformers("read " + transformers_folder()));
}

}  // namespace tessera::testing
