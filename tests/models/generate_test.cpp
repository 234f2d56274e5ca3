#include "models/generate.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>

#include "checkpoint/checkpoint.h"
#include "models/pretrained.h"
#include "testing/expect.h"
#include "testing/peer_python.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

models::DecoderConfig generate_config() {
  return {.vocab_size = 30,
          .hidden_size = 12,
          .intermediate_size = 16,
          .num_hidden_layers = 2,
          .num_attention_heads = 4,
          .num_key_value_heads = 2,
          .head_dim = 6,
          .max_position_embeddings = 32,
          .attention_scale = 1 / std::sqrt(6.0)};
}

/// Configs whose attention differs, by name.
std::map<std::string, models::DecoderConfig> configs() {
  std::map<std::string, models::DecoderConfig> all;
  all["rotary"] = generate_config();
  all["one key"] = generate_config();
  all["one key"].num_key_value_heads = 1;
  all["window"] = generate_config();
  all["window"].sliding_window = 3;
  all["soft cap"] = generate_config();
  all["soft cap"].attention_softcap = 2;
  all["soft cap"].sliding_window = 4;
  all["soft cap"].slides = {true, false};
  all["yarn"] = generate_config();
  all["yarn"].rotary = models::RotaryConfig{.type = models::RotaryConfig::Type::Yarn, .factor = 2};
  all["yarn"].rotary->original_max_position_embeddings = 16;
  auto& experts = all["experts"] = generate_config();
  experts.model_type = "mixtral";
  experts.moe = models::MoeConfig{.num_experts = 5, .num_experts_per_tok = 2, .intermediate_size = 9};
  auto& learned = all["learned positions"] = generate_config();
  learned.model_type = "gpt2";
  learned.norm = models::NormKind::Layer;
  learned.rotary.reset();
  learned.num_key_value_heads = 4;
  learned.query_bias = learned.output_bias = learned.mlp_bias = true;
  learned.activation = models::Activation::TanhGelu;
  learned.gated_mlp = false;
  return all;
}

/// Returns a model with weights that depend on the seed alone, large enough that tokens matter.
models::Decoder make_model(const models::DecoderConfig& config, uint64_t seed = 1) {
  const c10::NoGradGuard no_grad;
  models::Decoder model(config);
  auto generator = make_generator(seed);
  for (auto& parameter : model->parameters()) {
    parameter.normal_(parameter.dim() == 1 ? 1 : 0, 0.4, generator);
  }
  return model;
}

at::Tensor random_ids(int64_t rows, int64_t length, uint64_t seed = 2) {
  return at::randint(0, 30, {rows, length}, make_generator(seed), at::kLong);
}

/// Generates by computing everything anew for each token.
std::vector<int32_t> generate_slowly(models::Decoder& model, std::vector<int32_t> prompt, int64_t tokens) {
  const c10::NoGradGuard no_grad;
  const size_t begin = prompt.size();
  for (int64_t i = 0; i < tokens; ++i) {
    const auto logits = model(at::tensor(prompt, at::kLong).unsqueeze(0));
    prompt.push_back(static_cast<int32_t>(logits[0][-1].argmax().item<int64_t>()));
  }
  return {prompt.begin() + static_cast<std::ptrdiff_t>(begin), prompt.end()};
}

const std::vector<std::vector<int32_t>> kPrompts = {{3, 14, 15, 9, 26, 5}, {7}, {2, 7, 18, 28}};

}  // namespace

TEST_CASE("a forward with a KV cache computes what one without computes") {
  const c10::NoGradGuard no_grad;
  for (auto& [name, config] : configs()) {
    INFO(name);
    auto model = make_model(config);
    const auto ids = random_ids(2, 12);
    const auto whole = model(ids);
    models::KeyValueCache cache(12);
    std::vector<at::Tensor> parts;
    for (const auto& [begin, size] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 5}, {5, 1}, {6, 1}, {7, 4}, {11, 1}}) {
      parts.push_back(model->forward(ids.narrow(1, begin, size), {.cache = &cache}));
    }
    CHECK(cache.length() == 12);
    expect_close(at::cat(parts, 1), whole);
    models::KeyValueCache another(12);
    expect_close(model->forward(ids, {.cache = &another, .logits_to_keep = 3}), whole.narrow(1, 9, 3));
  }
}

TEST_CASE("segments of a row do not see each other") {
  for (auto& [name, config] : configs()) {
    INFO(name);
    auto model = make_model(config);
    const auto ids = random_ids(2, 12);
    // The second row's first and last segments have the same number, but are not one.
    const auto segment_ids =
        at::tensor({0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 4, 4, 3, 3, 3, 3, 3, 3, 3, 4, 4, 4}, at::kLong);
    const auto logits = model->forward(ids, {.segment_ids = segment_ids.view({2, 12})});
    const auto expect_alone = [&](int64_t row, int64_t begin, int64_t size) {
      expect_close(logits[row].narrow(0, begin, size), model(ids.narrow(0, row, 1).narrow(1, begin, size))[0]);
    };
    expect_alone(0, 0, 5);
    expect_alone(0, 5, 1);
    expect_alone(0, 6, 6);
    expect_alone(1, 0, 2);
    expect_alone(1, 2, 7);
    expect_alone(1, 9, 3);
  }
}

TEST_CASE("a row may have more tokens than learned positions if its segments have fewer") {
  auto config = configs().at("learned positions");
  config.max_position_embeddings = 8;
  auto model = make_model(config);
  const auto ids = random_ids(1, 12);
  const auto segment_ids = (at::arange(12) >= 8).to(at::kLong).unsqueeze(0);
  expect_close(model->forward(ids, {.segment_ids = segment_ids})[0].narrow(0, 8, 4), model(ids.narrow(1, 8, 4))[0]);
  expect_throws<ValueError>(
      [&] {
        model->forward(ids, {.segment_ids = at::zeros({1, 12}, at::kLong)});
      },
      "12 tokens, but the");
}

TEST_CASE("prompts of different lengths are continued as each of them alone") {
  for (auto& [name, config] : configs()) {
    INFO(name);
    auto model = make_model(config);
    const auto texts = models::generate(model, kPrompts, {.max_new_tokens = 9});
    REQUIRE(texts.size() == kPrompts.size());
    for (size_t i = 0; i < texts.size(); ++i) {
      CHECK(texts[i] == generate_slowly(model, kPrompts[i], 9));
    }
  }
}

TEST_CASE("a stop token ends its text, and the others go on") {
  auto model = make_model(generate_config());
  const auto whole = models::generate(model, kPrompts, {.max_new_tokens = 9});
  std::vector<std::pair<size_t, int32_t>> seen;
  const int32_t stop = whole[0][3];
  const auto texts = models::generate(
      model, kPrompts, {.max_new_tokens = 9, .stop_tokens = {stop}, .on_token = [&](size_t text, int32_t token) {
                          seen.emplace_back(text, token);
                        }});
  size_t tokens = 0;
  for (size_t i = 0; i < whole.size(); ++i) {
    const auto end = std::ranges::find(whole[i], stop);
    CHECK(texts[i] == std::vector<int32_t>(whole[i].begin(), end == whole[i].end() ? end : end + 1));
    tokens += texts[i].size();
  }
  CHECK(texts[0].size() <= 4);
  CHECK(seen.size() == tokens);
  CHECK(seen.front() == std::pair<size_t, int32_t>(0, whole[0][0]));
}

TEST_CASE("a sharded model generates what one rank generates") {
  struct Case {
    std::string name;
    std::vector<int64_t> sizes;
    std::vector<std::string> axes;
    models::DecoderLayout layout = {};
  };
  const std::vector<Case> cases = {
      {.name = "fully_shard over 3", .sizes = {3}, .axes = {"dp"}, .layout = {.recompute = models::Recompute::Full}},
      {.name = "tp 3", .sizes = {3}, .axes = {"tp"}},  // 4 heads and 2 keys on 3 ranks
      {.name = "2 x tp 2", .sizes = {2, 2}, .axes = {"dp", "tp"}},
      {.name = "2 x tp 2, sequence parallel",
       .sizes = {2, 2},
       .axes = {"dp", "tp"},
       .layout = {.sequence_parallel = true}},
  };
  const models::GenerateOptions greedy{.max_new_tokens = 7};
  const models::GenerateOptions drawn{.max_new_tokens = 7, .temperature = 1, .top_k = 10, .seed = 5};
  for (const auto& [name, config] : configs()) {
    auto single = make_model(config);
    const auto expected = models::generate(single, kPrompts, greedy);
    const auto expected_drawn = models::generate(single, kPrompts, drawn);
    for (const auto& item : cases) {
      run_ranks(static_cast<int>(item.sizes.size() == 1 ? item.sizes[0] : item.sizes[0] * item.sizes[1]), [&](int) {
        auto model = make_model(config);
        models::lay_out(model, init_device_mesh(at::kCPU, item.sizes, item.axes), item.layout);
        const auto where = fmt::format("{}, {}", name, item.name);
        expect_equal(std::pair(where, models::generate(model, kPrompts, greedy)), std::pair(where, expected));
        expect_equal(std::pair(where, models::generate(model, kPrompts, drawn)), std::pair(where, expected_drawn));
      });
    }
  }
}

TEST_CASE("draws follow the probabilities, and depend on the seed and the text's number alone") {
  auto model = make_model(generate_config());
  const models::GenerateOptions options{.max_new_tokens = 1, .temperature = 1.5, .top_k = 4, .seed = 3};
  const std::vector<std::vector<int32_t>> prompts(4000, kPrompts[0]);
  std::vector<double> counts(30);
  for (const auto& text : models::generate(model, prompts, options)) {
    counts[static_cast<size_t>(text[0])] += 1;
  }
  const auto logits = model(at::tensor(kPrompts[0], at::kLong).unsqueeze(0)).detach()[0][-1];
  const auto probabilities = models::sampling_probabilities(logits, options);
  for (int64_t token = 0; token < 30; ++token) {
    const double expected = 4000 * probabilities[token].item<double>(), seen = counts[static_cast<size_t>(token)];
    CHECK(std::abs(seen - expected) <= 4 * std::sqrt(expected));  // 4 standard deviations; none where 0 are expected
  }
  auto longer = options;
  longer.max_new_tokens = 8;
  const auto all = models::generate(model, kPrompts, longer);
  CHECK(models::generate(model, {kPrompts[0]}, longer)[0] == all[0]);
  longer.seed = 4;
  CHECK(models::generate(model, kPrompts, longer) != all);
}

TEST_CASE("generated tokens and probabilities are those of transformers") {
  const TempFolder folder;
  if (!run_peer_python("safetensors", "tests/models/generate_peer.py", folder.path())) {
    return;
  }
  int models_seen = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    if (!entry.is_directory() || !std::filesystem::exists(entry.path() / "config.json")) {
      continue;
    }
    ++models_seen;
    dcp::State state{.model = {{"ids", at::Tensor()}, {"lengths", at::Tensor()}, {"tokens", at::Tensor()}}};
    dcp::load(entry.path().string() + ".safetensors", state);
    const auto row = [&](const char* key, int64_t i, int64_t begin) {
      const auto tensor = std::get<at::Tensor>(state.model.at(key))[i];
      return tensor.narrow(0, begin, tensor.size(0) - begin).to(at::kInt).contiguous();
    };
    const auto values = [](const at::Tensor& tensor) {
      return std::vector<int32_t>(tensor.const_data_ptr<int32_t>(), tensor.const_data_ptr<int32_t>() + tensor.numel());
    };
    const auto lengths = std::get<at::Tensor>(state.model.at("lengths"));
    std::vector<std::vector<int32_t>> prompts, expected;
    for (int64_t i = 0; i < lengths.size(0); ++i) {
      const auto ids = row("ids", i, 0);
      prompts.push_back(values(row("ids", i, ids.size(0) - lengths[i].item<int64_t>())));
      expected.push_back(values(row("tokens", i, 0)));
      const auto stop = std::ranges::find(expected.back(), 5);
      expected.back().erase(stop == expected.back().end() ? stop : stop + 1, expected.back().end());
    }
    auto model = models::from_pretrained(entry.path().string());
    INFO(entry.path().filename().string());
    CHECK(models::generate(model, prompts, {.max_new_tokens = 12, .stop_tokens = {5}}) == expected);
  }
  CHECK(models_seen == 10);

  const std::vector<models::GenerateOptions> all_options = {{.temperature = 1.0},
                                                            {.temperature = 0.7},
                                                            {.temperature = 1.5, .top_k = 8},
                                                            {.temperature = 1.0, .top_p = 0.6},
                                                            {.temperature = 0.8, .top_k = 12, .top_p = 0.9}};
  dcp::State state{.model = {{"logits", at::Tensor()}}};
  const auto key = [](const models::GenerateOptions& options) {
    return fmt::format("{:.1f} {} {:.1f}", options.temperature, options.top_k, options.top_p);
  };
  for (const auto& options : all_options) {
    state.model[key(options)] = at::Tensor();
  }
  dcp::load(folder.path() + "/sampling.safetensors", state);
  for (const auto& options : all_options) {
    INFO(key(options));
    expect_close(models::sampling_probabilities(std::get<at::Tensor>(state.model.at("logits")), options),
                 std::get<at::Tensor>(state.model.at(key(options))));
  }
}

TEST_CASE("generation options come from the folder's files") {
  const TempFolder folder;
  const auto write = [&](const char* name, const char* text) { std::ofstream(folder.path(name)) << text; };
  write("config.json", R"({"eos_token_id": 7})");
  auto options = models::read_generation_options(folder.path());
  CHECK(options.stop_tokens == std::vector<int32_t>{7});
  CHECK(options.temperature == 0);
  write("generation_config.json", R"({"eos_token_id": [8, 9], "do_sample": true, "temperature": 0.6, "top_p": 0.9})");
  options = models::read_generation_options(folder.path());
  CHECK(options.stop_tokens == std::vector<int32_t>{8, 9});
  CHECK(options.temperature == 0.6);
  CHECK(options.top_k == 50);
  CHECK(options.top_p == 0.9);
  write("generation_config.json", R"({"eos_token_id": "end"})");
  expect_throws<ValueError>([&] { models::read_generation_options(folder.path()); },
                            R"(generation_config.json: eos_token_id is "end"; it must be the id of a token)");
  write("generation_config.json", R"({"do_sample": true, "top_p": 0})");
  expect_throws<ValueError>([&] { models::read_generation_options(folder.path()); },
                            "top_p is 0; it must be a number above 0");
  write("generation_config.json", "[");
  expect_throws<ValueError>([&] { models::read_generation_options(folder.path()); }, "generation_config.json: no JSON");
}

TEST_CASE("generation refuses what it cannot do, on all ranks") {
  auto model = make_model(configs().at("learned positions"));
  const auto refused = [&](const std::vector<std::vector<int32_t>>& prompts, const models::GenerateOptions& options,
                           const char* message) {
    expect_throws<ValueError>([&] { models::generate(model, prompts, options); }, message);
  };
  refused({}, {}, "no prompts");
  refused({{1}, {}}, {}, "prompt 1 is empty");
  refused({{1, 30}}, {}, "prompt 0 has the id 30; the vocabulary has 0 to 29");
  refused({{1, 2}}, {.max_new_tokens = 32}, "need 33 positions, but the model has 32");
  refused({{1}}, {.max_new_tokens = 0}, "max_new_tokens is 0");
  refused({{1}}, {.temperature = -1}, "temperature is -1");
  refused({{1}}, {.top_k = -1}, "top_k is -1");
  refused({{1}}, {.top_p = 1.5}, "top_p is 1.5");

  models::KeyValueCache cache(4);
  expect_throws<StateError>([&] { model->forward(random_ids(1, 2), {.cache = &cache}); }, "needs a NoGradGuard");
  const c10::NoGradGuard no_grad;
  expect_throws<ValueError>([&] { model->forward(random_ids(1, 5), {.cache = &cache}); }, "capacity of 4");
  model->forward(random_ids(1, 2), {.cache = &cache});
  expect_throws<ValueError>([&] { model->forward(random_ids(2, 1), {.cache = &cache}); },
                            "2 rows, but the cache has 1");
  const auto one = at::zeros({1, 1}, at::kLong);
  expect_throws<ValueError>([&] { model->forward(one, {.segment_ids = one, .cache = &cache}); },
                            "beside a cache of 2 tokens");
  expect_throws<ValueError>([&] { model->forward(random_ids(1, 2), {.segment_ids = one}); },
                            "must be of the ids' sizes");

  run_ranks(2, [&](int rank) {
    auto sharded = make_model(generate_config());
    models::lay_out(sharded, init_device_mesh(at::kCPU, {2}, {"dp"}));
    expect_throws<ValueError>([&] { models::generate(sharded, {{1 + rank}}); }, "has other arguments than rank 0");
    expect_throws<ValueError>([&] { models::generate(sharded, {{rank == 1 ? -1 : 1}}); }, "has the id -1");
  });
}

}  // namespace tessera::testing
