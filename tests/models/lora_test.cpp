// Compares decoders with adapters to those of Python's PEFT: logits, loss, gradients and steps of an optimizer, on one
// rank and sharded, and the folders that either has written.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <fmt/format.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint.h"
#include "checkpoint/format/checkpoint_error.h"
#include "dtensor/dtensor.h"
#include "lora/lora.h"
#include "models/adapter.h"
#include "models/pretrained.h"
#include "models/weight_names.h"
#include "optim/fused_optimizers.h"
#include "testing/expect.h"
#include "testing/fixtures.h"
#include "testing/peer_python.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr double kTolerance = 1e-5;
constexpr int kSteps = 5;

bool run_peft(const std::string& arguments) {
  return run_peer_python("safetensors", "tests/models/peft_peer.py", arguments);
}

/// Folder with what Python has made, once for all test cases; "" without Python.
const std::string& peft_folder() {
  static const TempFolder folder;
  setenv("PYTHONPYCACHEPREFIX", folder.path("compiled").c_str(), 1);  // else a sandbox keeps nothing of it
  static const std::string path = run_peft("write " + folder.path()) ? folder.path() : "";
  return path;
}

/// "llama.all" is odd in all sizes, and has an adapter of the output layer; in "qwen3" layer 0 has none.
const std::vector<std::string> kCases = {"llama", "llama.all", "qwen3", "gemma", "gpt2"};

double largest(const at::Tensor& tensor) {
  return tensor.abs().max().item<double>();
}

double relative_difference(const at::Tensor& own, const at::Tensor& expected) {
  return largest(own - expected) / largest(expected);
}

using Tensors = std::map<std::string, at::Tensor>;

/// What Python has computed, by name.
Tensors read_expected(const std::string& name, const Tensors& trained) {
  dcp::State state;
  for (const char* key : {"ids", "logits", "loss", "trained_logits"}) {
    state.model[key] = at::Tensor();
  }
  for (const auto& [key, tensor] : trained) {
    state.model["grad." + key] = at::Tensor();
    state.model["trained." + key] = at::Tensor();
  }
  dcp::load(peft_folder() + "/expected/" + name + ".safetensors", state);  // strict: Python trains the same matrices
  Tensors expected;
  for (const auto& [key, value] : state.model) {
    expected[key] = std::get<at::Tensor>(value);
  }
  return expected;
}

/// The parameters that train, by PEFT's names.
Tensors trained_parameters(const models::Decoder& model) {
  Tensors trained;
  for (const auto& item : model->named_parameters()) {
    if (item.value().requires_grad()) {
      const auto layer = item.key().substr(0, item.key().size() - std::string(".lora_A.weight").size());
      const auto stored = models::weight_source(model->config.model_type, layer + ".weight").key;
      trained["base_model.model." + stored.substr(0, stored.rfind('.')) + item.key().substr(layer.size())] =
          item.value();
    }
  }
  return trained;
}

void expect_small(const char* what, double difference) {
  if (!(difference <= kTolerance)) {
    throw ExpectationError(fmt::format("relative difference of {}: {:.1e}", what, difference));
  }
}

/// Trains on `rows` of the batch like Python, whose loss and gradients are those of the whole batch. Returns the
/// largest difference.
double expect_same_training(models::Decoder& model, const std::string& name, const at::Tensor& rows) {
  const auto trained = trained_parameters(model);
  const auto expected = read_expected(name, trained);
  const auto ids = expected.at("ids").index_select(0, rows);
  optim::FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.1).eps(1e-3));
  double worst = 0;
  const auto expect_close = [&](const char* what, const at::Tensor& own, const at::Tensor& wanted) {
    const double difference = relative_difference(own, wanted);
    expect_small(what, difference);
    worst = std::max(worst, difference);
  };
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto logits = model(ids);
    const auto loss = models::next_token_loss(logits, ids);
    loss.backward();
    if (step == 0) {
      expect_close("logits", logits, expected.at("logits").index_select(0, rows));
      if (rows.size(0) == expected.at("ids").size(0)) {
        expect_close("loss", loss, expected.at("loss"));
      }
      for (const auto& parameter : model->parameters()) {
        TESSERA_EXPECT(parameter.grad().defined() == parameter.requires_grad());
      }
      for (const auto& [key, parameter] : trained) {
        expect_close("gradients", full_tensor(parameter.grad()), expected.at("grad." + key));
      }
    }
    optimizer.step();
  }
  for (const auto& [key, parameter] : trained) {
    expect_close("trained adapters", full_tensor(parameter.detach()), expected.at("trained." + key));
  }
  const at::NoGradGuard no_grad;
  expect_close("trained logits", model(ids), expected.at("trained_logits").index_select(0, rows));
  return worst;
}

/// Mesh of ranks, and how a model is laid out on it.
struct Sharding {
  std::string name;
  std::vector<int64_t> sizes;  // of dp, and tp if there are two
  models::DecoderLayout layout = {};

  int ranks() const { return static_cast<int>(sizes.size() == 1 ? sizes[0] : sizes[0] * sizes[1]); }
};

const std::vector<Sharding> kShardings = {
    {.name = "fully_shard over 3", .sizes = {3}},
    {.name = "2 x tp 2", .sizes = {2, 2}},
    {.name = "2 x tp 2, sequence parallel, recomputed",
     .sizes = {2, 2},
     .layout = {.sequence_parallel = true, .recompute = models::Recompute::Full}},
};

models::Decoder load_adapted(const std::string& name, models::FromPretrainedOptions options) {
  options.dtype = at::kFloat;
  options.adapter = peft_folder() + "/adapters/" + name;
  return models::from_pretrained(peft_folder() + "/models/" + name, options);
}

/// Saves the adapters, and the model that they are merged into, for Python to read; the latter computes the same.
void expect_same_merged(models::Decoder& model, const std::string& name) {
  const at::NoGradGuard no_grad;
  models::save_adapter(model, peft_folder() + "/saved/" + name);
  const auto ids = at::arange(33).view({3, 11});
  const auto logits = model(ids);
  const auto weight = model->layers[1]->mlp->up_proj->weight;
  merge_lora(model);
  expect_small("merged logits", relative_difference(model(ids), logits));
  TESSERA_EXPECT(lora_layers(model).empty());
  TESSERA_EXPECT(model->layers[1]->mlp->up_proj->weight.is_same(weight));
  models::save_pretrained(model, peft_folder() + "/merged/" + name);
}

models::Decoder make_tiny(const std::string& model_type) {
  models::DecoderConfig config{.model_type = model_type,
                               .vocab_size = 20,
                               .hidden_size = 12,
                               .intermediate_size = 16,
                               .num_hidden_layers = 2,
                               .num_attention_heads = 2,
                               .num_key_value_heads = 2,
                               .head_dim = 6,
                               .max_position_embeddings = 8,
                               .attention_scale = 1 / std::sqrt(6.0)};
  if (model_type == "gpt2") {
    config.norm = models::NormKind::Layer;
    config.rotary.reset();
    config.query_bias = config.output_bias = config.mlp_bias = true;
    config.activation = models::Activation::TanhGelu;
    config.gated_mlp = false;
  }
  models::Decoder model(config);
  fill_parameters(*model, 1);
  return model;
}

at::Tensor tiny_ids() {
  return at::arange(16).view({2, 8});
}

/// Saves a tiny model's adapters to "adapter" in the folder.
models::Decoder save_tiny_adapter(const TempFolder& folder, const std::string& model_type) {
  auto model = make_tiny(model_type);
  add_lora(model, {.target_modules = {"down_proj", "layers.0.self_attn.q_proj"}, .r = 3, .lora_alpha = 6});
  for (const auto& item : model->named_parameters()) {
    if (is_lora_parameter(item.key())) {
      const at::NoGradGuard no_grad;
      item.value().normal_(0, 0.3, make_generator(item.key().size()));
    }
  }
  models::save_adapter(model, folder.path("adapter"));
  return model;
}

nlohmann::json json_of(const std::string& folder) {
  return nlohmann::json::parse(read_file(folder + "/adapter_config.json"));
}

}  // namespace

TEST_CASE("adapters train like those of PEFT, sharded or not") {
  if (peft_folder().empty()) {
    return;
  }
  std::filesystem::create_directory(peft_folder() + "/saved");
  std::filesystem::create_directory(peft_folder() + "/merged");
  double worst = 0;
  for (const auto& name : kCases) {
    INFO(name);
    auto model = load_adapted(name, {});
    worst = std::max(worst, expect_same_training(model, name, at::arange(6)));
    if (name == "qwen3" || name == "gpt2") {
      expect_same_merged(model, name);
    }
  }
  fmt::print("1 rank: largest relative difference {:.1e}\n", worst);
  for (const auto& sharding : kShardings) {
    INFO(sharding.name);
    run_ranks(sharding.ranks(), [&](int rank) {
      double worst_here = 0;
      for (const auto& name : kCases) {
        const auto axes =
            sharding.sizes.size() == 1 ? std::vector<std::string>{"dp"} : std::vector<std::string>{"dp", "tp"};
        auto model =
            load_adapted(name, {.mesh = init_device_mesh(at::kCPU, sharding.sizes, axes), .layout = sharding.layout});
        const int64_t count = 6 / sharding.sizes[0];
        const int64_t dp_rank = rank * sharding.sizes[0] / sharding.ranks();
        const auto rows = at::arange(dp_rank * count, (dp_rank + 1) * count);
        worst_here = std::max(worst_here, expect_same_training(model, name, rows));
        const bool saves = sharding.sizes.size() == 1           ? name == "llama"
                           : !sharding.layout.sequence_parallel ? name == "llama.all"
                                                                : name == "gemma";
        if (saves) {
          expect_same_merged(model, name);
        }
      }
      if (rank == 0) {
        fmt::print("{}: largest relative difference {:.1e}\n", sharding.name, worst_here);
      }
    });
  }
  REQUIRE(run_peft("read " + peft_folder()));
}

TEST_CASE("an adapter's folder is read back, into a model with and without adapters") {
  const TempFolder folder;
  auto saved = save_tiny_adapter(folder, "llama");
  auto fresh = make_tiny("llama");
  models::load_adapter(fresh, folder.path("adapter"));
  expect_bit_equal(fresh(tiny_ids()), saved(tiny_ids()));
  const auto config = json_of(folder.path("adapter"));
  CHECK(config["target_modules"] == nlohmann::json{"down_proj", "model.layers.0.self_attn.q_proj"});
  CHECK(config["lora_alpha"] == 6);
  CHECK_THROWS_AS(models::save_adapter(fresh, folder.path("adapter")), CheckpointError);  // it exists

  auto same = make_tiny("llama");
  add_lora(same, models::read_adapter_config(same, folder.path("adapter")));
  models::load_adapter(same, folder.path("adapter"));
  expect_bit_equal(same(tiny_ids()), saved(tiny_ids()));

  auto other = make_tiny("llama");
  add_lora(other, {.target_modules = {"q_proj"}, .r = 2});
  expect_throws<ValueError>([&] { models::load_adapter(other, folder.path("adapter")); },
                            "has adapters with r 3, lora_alpha 6, use_rslora false, layers (layers.0.mlp.down_proj, "
                            "layers.0.self_attn.q_proj, layers.1.mlp.down_proj); the model's have r 2, lora_alpha 8");
}

TEST_CASE("an adapter's config and tensors that are not supported are named") {
  const TempFolder folder;
  save_tiny_adapter(folder, "llama");
  const auto good = json_of(folder.path("adapter"));
  const auto expect_refused = [&](const char* key, const nlohmann::json& value, const std::string& part) {
    auto config = good;
    config[key] = value;
    std::ofstream(folder.path("adapter") + "/adapter_config.json") << config;
    auto model = make_tiny("llama");
    expect_throws<ValueError>([&] { models::load_adapter(model, folder.path("adapter")); },
                              "adapter_config.json: " + part);
    CHECK(lora_layers(model).empty());
  };
  expect_refused("peft_type", "IA3", "peft_type is \"IA3\"; it must be \"LORA\"");
  expect_refused("bias", "all", "bias is \"all\"; it must be \"none\"");
  expect_refused("r", 0, "r is 0; it must be an integer from 1 to 65536");
  expect_refused("r", nullptr, "r is null");
  expect_refused("lora_alpha", "8", "lora_alpha is \"8\"; it must be a number above 0");
  expect_refused("lora_dropout", 1.0, "lora_dropout is 1.0; it must be a number in [0, 1)");
  expect_refused("use_rslora", 1, "use_rslora is 1; it must be true or false");
  expect_refused("init_lora_weights", "pissa", "init_lora_weights is \"pissa\"; it must be true, false,");
  expect_refused("use_dora", true, "unknown keys, which may change what the model computes: use_dora (true)");
  expect_refused("rank_pattern", {{"q_proj", 4}},
                 "unknown keys, which may change what the model computes: rank_pattern ({\"q_proj\":4})");
  expect_refused("modules_to_save", {"lm_head"},
                 "unknown keys, which may change what the model computes: modules_to_save ([\"lm_head\"])");
  expect_refused("some_day", 1.5, "unknown keys, which may change what the model computes: some_day (1.5)");

  std::ofstream(folder.path("adapter") + "/adapter_config.json") << good;
  const auto file = folder.path("adapter") + "/adapter_model.safetensors";
  dcp::State state{.model = {{"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", at::Tensor()}}};
  dcp::load(file, state, {.strict = false});
  auto model = make_tiny("llama");
  dcp::export_safetensors(file, state.model);
  expect_throws<Error>([&] { models::load_adapter(model, folder.path("adapter")); }, "q_proj.lora_B.weight");
  state.model["base_model.model.model.norm.lora_A.weight"] = at::ones({1, 1});
  dcp::export_safetensors(file, state.model);
  expect_throws<CheckpointError>([&] { models::load_adapter(model, folder.path("adapter")); },
                                 "no adapter of a linear layer of this llama");
}

TEST_CASE("what cannot be saved is refused with the remedy") {
  const TempFolder folder;
  auto model = make_tiny("llama");
  expect_throws<StateError>([&] { models::save_adapter(model, folder.path("none")); }, "the model has no adapters");
  add_lora(model, {.target_modules = {"q_proj"}});
  expect_throws<StateError>([&] { models::save_pretrained(model, folder.path("model")); }, "call merge_lora first");
  auto gpt2 = make_tiny("gpt2");
  add_lora(gpt2, {.target_modules = {"v_proj", "o_proj"}});
  expect_throws<NotImplementedError>([&] { models::save_adapter(gpt2, folder.path("fused")); },
                                     "\"layers.0.self_attn.v_proj\" has an adapter, but PEFT's gpt2 has query, key and "
                                     "value in one matrix");
  CHECK(std::filesystem::is_empty(folder.path()));
  expect_throws<ValueError>(
      [&] {
        merge_lora(model);
        models::save_pretrained(model, folder.path("model"));
        models::from_pretrained(folder.path("model"),
                                {.lora = LoraConfig{.target_modules = {"q_proj"}}, .adapter = "x"});
      },
      "lora and adapter are both given");
}

TEST_CASE("from_pretrained adds new adapters, which change no bit") {
  const TempFolder folder;
  auto model = make_tiny("llama");
  models::save_pretrained(model, folder.path("model"));
  auto adapted = models::from_pretrained(folder.path("model"),
                                         {.lora = LoraConfig{.target_modules = {"[qv]_proj", "lm_head"}, .r = 2}});
  expect_bit_equal(adapted(tiny_ids()), model(tiny_ids()));
  CHECK(lora_layers(adapted).size() == 5);
  const auto a = adapted->named_parameters()["layers.1.self_attn.q_proj.lora_A.weight"];
  CHECK(a.std().item<double>() > 0.05);
}

}  // namespace tessera::testing
