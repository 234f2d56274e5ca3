#include "models/pretrained.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "checkpoint/checkpoint.h"
#include "checkpoint/format/checkpoint_error.h"
#include "dtensor/dtensor.h"
#include "models/weight_names.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

models::DecoderConfig llama_config(bool is_tied) {
  return {.vocab_size = 20,
          .hidden_size = 12,
          .intermediate_size = 16,
          .num_hidden_layers = 2,
          .num_attention_heads = 2,
          .num_key_value_heads = 2,
          .head_dim = 6,
          .max_position_embeddings = 8,
          .attention_scale = 1 / std::sqrt(6.0),
          .tie_word_embeddings = is_tied};
}

models::DecoderConfig gpt2_config() {
  auto config = llama_config(true);
  config.model_type = "gpt2";
  config.norm = models::NormKind::Layer;
  config.rotary.reset();
  config.query_bias = config.output_bias = config.mlp_bias = true;
  config.activation = models::Activation::TanhGelu;
  config.gated_mlp = false;
  return config;
}

models::DecoderConfig mixtral_config() {
  auto config = llama_config(false);
  config.model_type = "mixtral";
  config.moe = {.num_experts = 5, .num_experts_per_tok = 2, .intermediate_size = 16};
  return config;
}

/// Writes config.json and these tensors as a folder.
void write_folder(const std::string& folder, const std::string& config, const dcp::StateDict& tensors) {
  std::filesystem::create_directory(folder);
  std::ofstream(folder + "/config.json") << config;
  dcp::export_safetensors(folder + "/model.safetensors", tensors);
}

/// Returns the tensors of a folder that one rank has saved.
dcp::StateDict tensors_of(models::Decoder& model) {
  dcp::StateDict tensors;
  for (const auto& item : model->named_parameters()) {
    const auto source = models::weight_source(model->config.model_type, item.key());
    const auto value = item.value().detach();
    for (int64_t expert = 0; source.by_expert && expert < value.size(0); ++expert) {
      tensors[source.key_of(expert)] = value[expert];
    }
    if (!source.by_expert) {
      tensors[source.key] = value;
    }
  }
  return tensors;
}

}  // namespace

TEST_CASE("a saved decoder loads bit by bit under any layout") {
  for (const auto& config : {llama_config(false), llama_config(true), gpt2_config(), mixtral_config()}) {
    const TempFolder folder;
    models::Decoder model(config);
    models::save_pretrained(model, folder.path("plain"));
    run_ranks(4, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
      auto sharded = models::from_pretrained(folder.path("plain"), {.mesh = mesh});
      const auto weight =
          config.moe ? sharded->layers[0]->moe->experts->up_proj : sharded->layers[0]->mlp->up_proj->weight;
      TESSERA_EXPECT(to_local(weight).numel() == weight.numel() / 4);
      models::save_pretrained(sharded, folder.path("sharded"));
      const auto by_tp = init_device_mesh(at::kCPU, {4}, {"tp"});
      auto again = models::from_pretrained(folder.path("sharded"), {.mesh = by_tp});
      for (const auto& item : again->named_parameters()) {
        expect_bit_equal(full_tensor(item.value()), *model->named_parameters().find(item.key()));
      }
    });
    auto loaded = models::from_pretrained(folder.path("sharded"), {.dtype = at::kBFloat16});
    for (const auto& item : loaded->named_parameters()) {
      expect_bit_equal(item.value().detach(), model->named_parameters().find(item.key())->detach().to(at::kBFloat16));
    }
    CHECK(loaded->config.dtype == at::kBFloat16);
  }
}

TEST_CASE("layouts train the parameters' shards in the asked-for dtypes") {
  const TempFolder folder;
  models::Decoder model(llama_config(true));
  models::save_pretrained(model, folder.path("plain"));
  run_ranks(2, [&](int) {
    const models::DecoderLayout layout{.recompute = models::Recompute::Full,
                                       .precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
    expect_equal(
        layout.to_string(),
        std::string("sequence_parallel: false, expert_parallel: false, recompute: full, computes in: BFloat16, "
                    "reduces in: Float, reshard_after_forward: true"));
    auto sharded = models::from_pretrained(folder.path("plain"),
                                           {.mesh = init_device_mesh(at::kCPU, {2}, {"dp"}), .layout = layout});
    const auto ids = at::arange(8).unsqueeze(0);
    const auto logits = sharded(ids);
    expect_equal(logits.scalar_type(), at::kBFloat16);
    models::next_token_loss(logits, ids).backward();
    for (const auto& item : sharded->named_parameters()) {
      expect_equal(item.value().scalar_type(), at::kFloat);
      TESSERA_EXPECT(item.value().grad().defined() && is_dtensor(item.value().grad()));
    }
  });
}

TEST_CASE("all tensors that do not fit are listed at once, on every rank, and nothing is read") {
  const TempFolder folder;
  models::Decoder model(llama_config(false));
  auto tensors = tensors_of(model);
  tensors.erase("model.norm.weight");
  tensors.erase("lm_head.weight");
  tensors["model.layers.0.mlp.up_proj.weight"] = at::ones({12, 16});
  tensors["model.layers.1.mlp.up_proj.weight"] = at::ones({16, 12}, at::kLong);
  tensors["model.layers.2.mlp.up_proj.weight"] = at::ones({16, 12});
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = at::ones({3});  // of old checkpoints
  write_folder(folder.path("wrong"), models::format_config(model->config), tensors);
  const std::string message =
      "missing: (lm_head.weight, model.norm.weight); unexpected: (model.layers.2.mlp.up_proj.weight); of other sizes "
      "or dtypes: (model.layers.0.mlp.up_proj.weight [12, 16], the model's has [16, 12]; "
      "model.layers.1.mlp.up_proj.weight of dtype Long, the model's has Float)";
  run_ranks(2, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    expect_throws<CheckpointError>([&] { models::from_pretrained(folder.path("wrong"), {.mesh = mesh}); }, message);
  });
}

TEST_CASE("an expert that a folder lacks is missed on every rank, also where it would not be read") {
  const TempFolder folder;
  models::Decoder model(mixtral_config());
  auto tensors = tensors_of(model);
  tensors.erase("model.layers.0.block_sparse_moe.experts.3.w1.weight");
  tensors["model.layers.1.block_sparse_moe.experts.4.w2.weight"] = at::ones({12, 15});
  tensors["model.layers.1.block_sparse_moe.experts.5.w2.weight"] = at::ones({12, 16});
  write_folder(folder.path("wrong"), models::format_config(model->config), tensors);
  run_ranks(4, [&](int) {
    expect_throws<CheckpointError>(
        [&] {
          models::from_pretrained(folder.path("wrong"),
                                  {.mesh = init_device_mesh(at::kCPU, {4}, {"tp"}),
                                   .layout = {.sequence_parallel = true, .expert_parallel = true}});
        },
        "missing: (model.layers.0.block_sparse_moe.experts.3.w1.weight); unexpected: "
        "(model.layers.1.block_sparse_moe.experts.5.w2.weight); of other sizes or dtypes: "
        "(model.layers.1.block_sparse_moe.experts.4.w2.weight [12, 15], the model's has [12, 16])");
  });
}

TEST_CASE("a tied model's folder may have the output layer too, if it is the same") {
  const TempFolder folder;
  models::Decoder model(llama_config(true));
  auto tensors = tensors_of(model);
  const auto config = models::format_config(model->config);
  tensors["lm_head.weight"] = model->embed_tokens->weight.detach();
  write_folder(folder.path("same"), config, tensors);
  tensors["lm_head.weight"] = model->embed_tokens->weight.detach() + 1;
  write_folder(folder.path("other"), config, tensors);
  run_ranks(2, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    auto loaded = models::from_pretrained(folder.path("same"), {.mesh = mesh});
    expect_bit_equal(full_tensor(loaded->embed_tokens->weight), model->embed_tokens->weight.detach());
    expect_throws<CheckpointError>([&] { models::from_pretrained(folder.path("other"), {.mesh = mesh}); },
                                   "lm_head.weight is not equal to the embedding");
  });
}

TEST_CASE("damaged folders are refused on every rank") {
  const TempFolder folder;
  models::Decoder model(llama_config(true));
  const auto config = models::format_config(model->config);
  const auto weights = "/model.safetensors";
  const auto add_folder = [&](const std::string& name) {
    write_folder(folder.path(name), config, tensors_of(model));
    return folder.path(name);
  };
  const auto add_index = [&](const std::string& name, const std::string& file) {
    std::ofstream(add_folder(name) + "/model.safetensors.index.json")
        << R"({"weight_map": {"model.norm.weight": ")" << file << R"("}})";
  };
  add_index("absent", "model-00001-of-00002.safetensors");
  add_index("outside", "../absent/model.safetensors");
  std::filesystem::resize_file(add_folder("short") + weights, 1000);
  const auto cut = add_folder("cut") + weights;
  std::filesystem::resize_file(cut, std::filesystem::file_size(cut) - 4);
  std::filesystem::resize_file(add_folder("large") + "/config.json", 100'000'000);
  std::ofstream(add_folder("deep") + "/config.json") << R"({"model_type": )" << std::string(10'000, '[');
  auto more = model->config;
  more.vocab_size = 21;
  std::ofstream(add_folder("vocabulary") + "/config.json") << models::format_config(more);
  run_ranks(2, [&](int) {
    const auto expect_refused = [&](const std::string& name, const std::string& message) {
      expect_throws<CheckpointError>([&] { models::from_pretrained(folder.path(name)); }, message);
    };
    expect_refused("absent", "model-00001-of-00002.safetensors: cannot be opened");
    expect_refused("outside", "only names of files in the same folder are allowed");
    expect_refused("short", "the file is truncated");
    expect_refused("cut", "it is truncated");
    expect_refused("large", "config.json: 100000000 bytes, of at most");
    expect_refused("deep", "config.json: nested more than 32 deep");
    expect_refused("vocabulary", "model.embed_tokens.weight [20, 12], the model's has [21, 12]");
  });
}

TEST_CASE("folders, options and meshes that do not fit are refused on every rank") {
  const TempFolder folder;
  models::Decoder model(llama_config(true));
  models::save_pretrained(model, folder.path("plain"));
  auto config = model->config;
  config.norm_eps = 1e-3;
  write_folder(folder.path("other"), models::format_config(config), tensors_of(model));
  run_ranks(2, [&](int rank) {
    const auto load = [&](models::FromPretrainedOptions options) {
      return models::from_pretrained(folder.path("plain"), options);
    };
    expect_throws<CheckpointError>([&] { models::from_pretrained(folder.path("none")); }, "none/config.json");
    expect_throws<ValueError>([&] { models::from_pretrained(folder.path(rank == 0 ? "plain" : "other")); },
                              "rank 1 reads another config.json");
    expect_throws<ValueError>([&] { load({.dtype = at::kLong}); }, "dtype Long of the parameters");
    expect_throws<ValueError>([&] { load({.dtype = at::kFloat8_e4m3fn}); }, "dtype is Float8_e4m3fn; it must be");
    expect_throws<ValueError>([&] { load({.mesh = init_device_mesh(at::kCPU, {2}, {"data"})}); },
                              "the mesh has an axis \"data\"; allowed are");
    expect_throws<ValueError>([&] { load({.mesh = init_device_mesh(at::kCPU, {2}, {"replicate"})}); },
                              "give \"dp\" beside \"replicate\"");
    expect_throws<ValueError>(
        [&] { load({.mesh = init_device_mesh(at::kCPU, {2}, {"dp"}), .layout = {.sequence_parallel = true}}); },
        "sequence_parallel needs an axis \"tp\"");
    const auto tp = init_device_mesh(at::kCPU, {2}, {"tp"});
    expect_throws<ValueError>(
        [&] { load({.mesh = tp, .layout = {.sequence_parallel = true, .expert_parallel = true}}); },
        "expert_parallel needs a model with experts, and sequence_parallel");
    expect_throws<ValueError>([&] { load({.mesh = tp, .layout = {.expert_parallel = true}}); },
                              "this is a llama without sequence_parallel");
  });
}

}  // namespace tessera::testing
