#include "examples/finetune/tiny_llama.h"

#include <torch/utils.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "models/pretrained.h"

namespace tessera::examples {

namespace {

using nlohmann::json;

constexpr int kEnd = 256;

models::DecoderConfig tiny_config() {
  return {.model_type = "llama",
          .vocab_size = kEnd + 1,
          .hidden_size = 96,
          .intermediate_size = 256,
          .num_hidden_layers = 4,
          .num_attention_heads = 6,
          .num_key_value_heads = 2,
          .head_dim = 16,
          .max_position_embeddings = 2048,
          .attention_scale = 1 / std::sqrt(16.0),
          .tie_word_embeddings = true,
          .other_keys = json{{"bos_token_id", kEnd}, {"eos_token_id", kEnd}}.dump()};
}

/// The character that byte-level tokenizers write for a byte (openai/gpt-2, bytes_to_unicode).
std::string character_of(int byte) {
  const bool is_itself = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  int code = byte;
  if (!is_itself) {
    code = 256 + (byte < 33 ? byte : byte < 161 ? byte - 127 + 33 : 67);
  }
  std::string text;
  if (code < 128) {
    text += static_cast<char>(code);
  } else {
    text += static_cast<char>(0xc0 | (code >> 6));
    text += static_cast<char>(0x80 | (code & 0x3f));
  }
  return text;
}

json byte_tokenizer() {
  json vocabulary = json::object();
  for (int byte = 0; byte < kEnd; ++byte) {
    vocabulary[character_of(byte)] = byte;
  }
  const json end = {{"id", kEnd},      {"content", "<|end|>"}, {"single_word", false}, {"lstrip", false},
                    {"rstrip", false}, {"normalized", false},  {"special", true}};
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", json::array({end})},
          {"normalizer", nullptr},
          {"pre_tokenizer",
           {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}}},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}}},
          {"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", json::array()}}}};
}

void write(const std::string& path, const json& content) {
  std::ofstream file(path);
  file << content.dump(2) << "\n";
  TESSERA_CHECK(Error, file.flush().good(), "{} cannot be written", path);
}

}  // namespace

void write_tiny_llama(const std::string& folder) {
  torch::manual_seed(0);
  models::Decoder model(tiny_config());
  const c10::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) {
    if (parameter.dim() == 2) {
      parameter.normal_(0, 0.02);
    }
  }
  models::save_pretrained(model, folder);
  write(folder + "/tokenizer.json", byte_tokenizer());
  write(folder + "/tokenizer_config.json",
        {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"eos_token", "<|end|>"}, {"model_max_length", 2048}});
}

}  // namespace tessera::examples
