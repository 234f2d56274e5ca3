// Compares models with those of Python's transformers: logits, loss and every gradient of many configs, on one rank and
// sharded, parameters after some steps of an optimizer, and what transformers reads of the folders that we save.
// docs/generated/models.md lists the models.

#include <ATen/TensorOperators.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "checkpoint/checkpoint.h"
#include "dtensor/dtensor.h"
#include "models/pretrained.h"
#include "models/weight_names.h"
#include "optim/fused_optimizers.h"
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

/// The names of the stored tensors that a parameter is, or is a part of.
std::vector<std::string> stored_keys(const models::Decoder& model, const std::string& parameter, int64_t experts) {
  const auto source = models::weight_source(model->config.model_type, parameter);
  std::vector<std::string> keys;
  for (int64_t expert = 0; source.by_expert && expert < experts; ++expert) {
    keys.push_back(source.key_of(expert));
  }
  return source.by_expert ? keys : std::vector{source.key};
}

Expected read_tensors(const std::string& file, std::set<std::string> keys, const std::string& prefix,
                      const models::Decoder& model) {
  for (const auto& item : model->named_parameters()) {
    for (const auto& key : stored_keys(model, item.key(), item.value().size(0))) {
      keys.insert(prefix + key);
    }
  }
  dcp::State state;
  for (const auto& key : keys) {
    state.model[key] = at::Tensor();
  }
  dcp::load(file, state);  // strict: all are there, and no others
  Expected expected;
  for (const auto& [key, value] : state.model) {
    expected[key] = std::get<at::Tensor>(value);
  }
  return expected;
}

Expected read_expected(const std::string& name, const models::Decoder& model) {
  return read_tensors(transformers_folder() + "/expected/" + name + ".safetensors", {"ids", "logits", "loss"}, "grad.",
                      model);
}

/// A part of a parameter, or of its gradient, beside what it must be.
struct Compared {
  at::Tensor own;
  at::Tensor expected;
  double scale;  // largest element of the stored tensor

  double difference(double least_scale) const { return largest(own - expected) / std::max(scale, least_scale); }
};

/// Returns an expert's part each, or the whole.
std::vector<Compared> compare_stored(const models::Decoder& model, const std::string& parameter, const at::Tensor& own,
                                     const Expected& expected, const std::string& prefix) {
  const auto source = models::weight_source(model->config.model_type, parameter);
  std::vector<Compared> parts;
  for (const auto& key : stored_keys(model, parameter, own.size(0))) {
    const auto& stored = expected.at(prefix + key);
    parts.push_back({.own = source.by_expert ? own[std::ssize(parts)] : own,
                     .expected = (source.is_transposed ? stored.t() : stored).chunk(source.parts, 0)[source.part],
                     .scale = largest(stored)});
  }
  return parts;
}

/// Largest differences, relative to the largest element.
struct Differences {
  double logits = 0;
  double loss = 0;
  double gradients = 0;
  double trained = 0;
  std::string gradient = {};  // the parameter whose is the most different

  void include(const Differences& other) {
    logits = std::max(logits, other.logits);
    loss = std::max(loss, other.loss);
    gradient = other.gradients > gradients ? other.gradient : gradient;
    gradients = std::max(gradients, other.gradients);
    trained = std::max(trained, other.trained);
  }
  std::string to_string() const {
    return fmt::format(
        "relative differences of logits {:.1e}, loss {:.1e}, gradients {:.1e} ({}), trained parameters {:.1e}", logits,
        loss, gradients, gradient, trained);
  }
  void expect_small(const std::string& name) const {
    if (!(std::max({logits, loss, gradients, trained}) <= kTolerance)) {
      throw ExpectationError(fmt::format("{}: {}", name, to_string()));
    }
  }
};

/// Relative to the stored tensor's largest gradient, and where that vanishes to a thousandth of the model's.
void compare_gradients(const models::Decoder& model, const Expected& expected, Differences& differences) {
  double most = 0;
  for (const auto& [key, value] : expected) {
    most = key.starts_with("grad.") ? std::max(most, largest(value)) : most;
  }
  for (const auto& item : model->named_parameters()) {
    TESSERA_EXPECT(item.value().grad().defined());
    for (const auto& part : compare_stored(model, item.key(), full_tensor(item.value().grad()), expected, "grad.")) {
      differences.include({.gradients = part.difference(1e-3 * most), .gradient = item.key()});
    }
  }
}

at::Tensor with_router_loss(models::Decoder& model, const at::Tensor& loss) {
  const auto& moe = model->config.moe;
  return moe && moe->output_router_logits ? loss + models::router_aux_loss(model) : loss;
}

/// Runs a step on `rows` of the batch. Losses are compared only if these are all.
Differences step_difference(models::Decoder& model, const Expected& expected, const at::Tensor& rows) {
  const auto ids = expected.at("ids").index_select(0, rows);
  const auto logits = expected.at("logits").index_select(0, rows);
  const auto own = model(ids);
  const auto loss = with_router_loss(model, models::next_token_loss(own, ids));
  loss.backward();
  Differences differences{.logits = largest(own - logits) / largest(logits)};
  if (rows.size(0) == expected.at("ids").size(0)) {
    differences.loss = std::abs(loss.item<double>() / expected.at("loss").item<double>() - 1);
  }
  compare_gradients(model, expected, differences);
  return differences;
}

/// Trains on from the first gradients, if Python did, and returns the largest difference of a parameter. The logits of
/// these steps are never whole.
double train_difference(models::Decoder& model, const std::string& name, const at::Tensor& ids) {
  const auto file = transformers_folder() + "/trained/" + name + ".safetensors";
  if (!std::filesystem::exists(file)) {
    return 0;
  }
  optim::FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3).weight_decay(0.1).eps(1e-3));
  for (int step = 0; step < 5; ++step) {
    if (step > 0) {
      optimizer.zero_grad();
      with_router_loss(model, model->forward(ids, {.labels = ids})).backward();
    }
    optimizer.step();
  }
  const auto expected = read_tensors(file, {}, "", model);
  double worst = 0;
  for (const auto& item : model->named_parameters()) {
    for (const auto& part : compare_stored(model, item.key(), full_tensor(item.value().detach()), expected, "")) {
      worst = std::max(worst, part.difference(0));
    }
  }
  return worst;
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

/// What is special on several ranks: fused and tied weights, windows, norms of heads, experts that a rank's tokens do
/// not reach, and heads that the ranks of tp do not divide (three in gpt2.epsilon, one key in llama.one_key).
const std::vector<std::string> kShardedModels = {
    "gpt2.plain",     "gpt2.epsilon",    "llama.plain",           "llama.tied",          "llama.padding_tied",
    "llama.one_key",  "llama.biases",    "gemma.plain",           "gemma2.plain",        "gemma3_text.plain",
    "mistral.window", "mixtral.plain",   "mixtral.many",          "mixtral.router_loss", "qwen2.tied",
    "qwen3.window",   "qwen3_moe.mixed", "qwen3_moe.router_loss", "stablelm.biases",
};

const std::vector<Sharding> kShardings = {
    {.name = "fully_shard over 2", .sizes = {2}, .layout = {.recompute = models::Recompute::Selective}},
    {.name = "fully_shard over 3", .sizes = {3}, .layout = {.recompute = models::Recompute::Full}},
    {.name = "2 x tp 2", .sizes = {2, 2}},
    {.name = "2 x tp 2, sequence parallel",
     .sizes = {2, 2},
     .layout = {.sequence_parallel = true, .recompute = models::Recompute::Full}},
    {.name = "2 x tp 2, whole experts",
     .sizes = {2, 2},
     .layout = {.sequence_parallel = true, .expert_parallel = true, .recompute = models::Recompute::Selective}},
    {.name = "1 x tp 3, whole experts",
     .sizes = {1, 3},
     .layout = {.sequence_parallel = true, .expert_parallel = true, .recompute = models::Recompute::Full}},
};

std::vector<std::string> models_for(const Sharding& sharding) {
  auto names = kShardedModels;
  if (sharding.layout.expert_parallel) {
    std::erase_if(
        names, [](const std::string& name) { return !name.starts_with("mixtral") && !name.starts_with("qwen3_moe"); });
  }
  return names;
}

/// Two ranks of dp have a row each, whose gradients are averaged; others have the whole batch. So do those whose loss
/// is no mean over rows.
at::Tensor rows_of(const Sharding& sharding, const std::string& name, int rank) {
  const int64_t dp_rank = rank / (sharding.ranks() / sharding.sizes[0]);
  const bool has_all = sharding.sizes[0] != 2 || name.ends_with("router_loss");
  return has_all ? at::arange(2) : at::arange(dp_rank, dp_rank + 1);
}

}  // namespace

TEST_CASE("decoders compute what transformers computes") {
  if (transformers_folder().empty()) {
    return;
  }
  const auto names = model_names();
  REQUIRE(names.size() >= 200);
  Differences worst;
  for (const auto& name : names) {
    auto model = models::from_pretrained(transformers_folder() + "/models/" + name, {.dtype = at::kFloat});
    const auto expected = read_expected(name, model);
    auto differences = step_difference(model, expected, at::arange(2));
    differences.trained = train_difference(model, name, expected.at("ids"));
    differences.expect_small(name);
    worst.include(differences);
  }
  fmt::print("{} models: largest {}\n", names.size(), worst.to_string());
}

TEST_CASE("sharded decoders compute what transformers computes") {
  if (transformers_folder().empty()) {
    return;
  }
  for (const auto& sharding : kShardings) {
    run_ranks(sharding.ranks(), [&](int rank) {
      Differences worst;
      for (const auto& name : models_for(sharding)) {
        auto model = load_sharded(name, sharding);
        TESSERA_EXPECT(device_mesh(model->layers[0]->self_attn->q_proj->weight).size() == sharding.ranks());
        const auto expected = read_expected(name, model);
        const auto rows = rows_of(sharding, name, rank);
        auto differences = step_difference(model, expected, rows);
        differences.trained = train_difference(model, name, expected.at("ids").index_select(0, rows));
        differences.expect_small(fmt::format("{}, {}", name, sharding.name));
        worst.include(differences);
      }
      if (rank == 0) {
        fmt::print("{}: largest {}\n", sharding.name, worst.to_string());
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
  const auto save_sharded = [&](const std::string& name, const Sharding& sharding, const std::string& suffix) {
    auto model = load_sharded(name, sharding);
    models::save_pretrained(model, target(name) + suffix);
  };
  for (const auto& sharding : {kShardings[1], kShardings[2], kShardings[4]}) {
    run_ranks(sharding.ranks(), [&](int) {
      const auto names = models_for(sharding);
      for (size_t i = sharding.ranks() % 2; i < names.size(); i += 2) {
        save_sharded(names[i], sharding, sharding.layout.expert_parallel ? ".whole_experts" : "");
      }
    });
  }
  const auto names = model_names();
  for (size_t i = 0; i < names.size(); i += 3) {
    if (!std::filesystem::exists(target(names[i]))) {
      auto model = models::from_pretrained(transformers_folder() + "/models/" + names[i], {.dtype = at::kFloat});
      models::save_pretrained(model, target(names[i]), {.max_file_bytes = 10'000});
    }
  }
  CHECK(read_file(target("llama.plain") + "/tokenizer_config.json") == R"({"made_by": "the test"})");
  REQUIRE(run_transformers("read " + transformers_folder()));
}

}  // namespace tessera::testing
