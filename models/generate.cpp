#include "models/generate.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <random>

#include "base/error.h"
#include "checkpoint/ranks/rank_sync.h"
#include "dtensor/dtensor.h"
#include "models/config_reader.h"

namespace tessera::models {

namespace {

using Prompts = std::vector<std::vector<int32_t>>;

constexpr int64_t kDefaultTopK = 50;  // default of transformers when sampling

void check_options(const GenerateOptions& options) {
  TESSERA_CHECK(ValueError, options.max_new_tokens >= 1, "generate: max_new_tokens is {}; it must be at least 1",
                options.max_new_tokens);
  TESSERA_CHECK(ValueError, options.temperature >= 0, "generate: temperature is {}; it must be at least 0",
                options.temperature);
  TESSERA_CHECK(ValueError, options.top_k >= 0, "generate: top_k is {}; it must be at least 0", options.top_k);
  TESSERA_CHECK(ValueError, options.top_p > 0 && options.top_p <= 1,
                "generate: top_p is {}; it must be above 0 and at most 1", options.top_p);
}

int64_t longest_of(const Prompts& prompts) {
  size_t longest = 0;
  for (const auto& prompt : prompts) {
    longest = std::max(longest, prompt.size());
  }
  return static_cast<int64_t>(longest);
}

void check_prompts(const DecoderConfig& config, const Prompts& prompts, const GenerateOptions& options) {
  TESSERA_CHECK(ValueError, !prompts.empty(), "generate: no prompts; give at least one");
  for (size_t i = 0; i < prompts.size(); ++i) {
    TESSERA_CHECK(ValueError, !prompts[i].empty(), "generate: prompt {} is empty; begin it with a token", i);
    const auto bad = std::ranges::find_if(prompts[i], [&](int32_t id) { return id < 0 || id >= config.vocab_size; });
    TESSERA_CHECK(ValueError, bad == prompts[i].end(), "generate: prompt {} has the id {}; the vocabulary has 0 to {}",
                  i, *bad, config.vocab_size - 1);
  }
  const int64_t length = longest_of(prompts) + options.max_new_tokens - 1;
  TESSERA_CHECK(ValueError, config.rotary || length <= config.max_position_embeddings,
                "generate: {} tokens of a prompt and max_new_tokens {} need {} positions, but the model has {}",
                longest_of(prompts), options.max_new_tokens, length, config.max_position_embeddings);
}

/// Checks the arguments on all ranks, and that they are equal.
void check_arguments(const DecoderConfig& config, const Prompts& prompts, const GenerateOptions& options,
                     const dcp::RankSync& ranks) {
  const auto texts = ranks.exchange([&] {
    check_options(options);
    check_prompts(config, prompts, options);
    return fmt::format("prompts {}, max_new_tokens {}, stop_tokens {}", prompts, options.max_new_tokens,
                       options.stop_tokens);
  });
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    TESSERA_CHECK(
        ValueError, texts[rank] == texts[0],
        "generate: rank {} has other arguments than rank 0; give a sharded model the same on all ranks: {:.200} "
        "and {:.200}",
        rank, texts[rank], texts[0]);
  }
}

/// Prompts as one tensor, padded on the left, so that each row ends with a token of its prompt.
struct PaddedPrompts {
  at::Tensor ids;          // [prompts, longest]
  at::Tensor segment_ids;  // 0 for padding, 1 for the prompt; undefined without padding
};

PaddedPrompts pad(const Prompts& prompts, at::Device device) {
  const auto rows = static_cast<int64_t>(prompts.size());
  const int64_t length = longest_of(prompts);
  PaddedPrompts padded{.ids = at::zeros({rows, length}, at::kLong),
                       .segment_ids = at::zeros({rows, length}, at::kLong)};
  bool has_padding = false;
  for (int64_t row = 0; row < rows; ++row) {
    const auto& prompt = prompts[static_cast<size_t>(row)];
    const auto size = static_cast<int64_t>(prompt.size());
    padded.ids[row].narrow(0, length - size, size).copy_(at::tensor(prompt));
    padded.segment_ids[row].narrow(0, length - size, size).fill_(1);
    has_padding = has_padding || size < length;
  }
  padded.ids = padded.ids.to(device);
  padded.segment_ids = has_padding ? padded.segment_ids.to(device) : at::Tensor();
  return padded;
}

/// Chooses each text's next token.
class Chooser {
 public:
  Chooser(const GenerateOptions& options, size_t texts) : options_(options) {
    for (size_t text = 0; text < texts; ++text) {
      std::seed_seq seed{static_cast<uint64_t>(options.seed & 0xffffffff), options.seed >> 32, uint64_t{text}};
      streams_.emplace_back(seed);
    }
  }

  /// Returns one token per row of `logits` [texts, vocab].
  std::vector<int64_t> choose(const at::Tensor& logits) {
    at::Tensor tokens;
    if (options_.temperature == 0) {
      tokens = logits.argmax(-1);
    } else {
      const auto sums = at::cumsum(sampling_probabilities(logits, options_), -1, at::kDouble).cpu();
      const auto total = sums.select(-1, sums.size(-1) - 1);
      auto drawn = at::empty({logits.size(0), 1}, at::kDouble);
      for (size_t text = 0; text < streams_.size(); ++text) {
        const double uniform = static_cast<double>(streams_[text]() >> 11) * 0x1p-53;  // below 1
        const auto row = static_cast<int64_t>(text);
        drawn[row][0] = uniform * total[row].item<double>();
      }
      tokens = at::searchsorted(sums, drawn, /*out_int32=*/false, /*right=*/true).squeeze(-1);
    }
    tokens = tokens.to(at::kCPU, at::kLong).contiguous();
    return {tokens.const_data_ptr<int64_t>(), tokens.const_data_ptr<int64_t>() + tokens.numel()};
  }

 private:
  const GenerateOptions& options_;
  std::vector<std::mt19937_64> streams_;
};

bool is_sharded(const Decoder& model) {
  return std::ranges::any_of(model->parameters(), [](const at::Tensor& parameter) { return is_dtensor(parameter); });
}

std::vector<int32_t> read_stop_tokens(KeyReader& reader) {
  std::vector<int32_t> tokens;
  const Json* const found = reader.find("eos_token_id");
  for (const auto& token : !found ? Json::array() : found->is_array() ? *found : Json::array({*found})) {
    if (!token.is_number_integer() || token.get<double>() < 0 || token.get<double>() > INT32_MAX) {
      reader.fail("eos_token_id", "the id of a token, or a list of ids");
    }
    tokens.push_back(token.get<int32_t>());
  }
  return tokens;
}

}  // namespace

at::Tensor sampling_probabilities(const at::Tensor& logits, const GenerateOptions& options) {
  auto scaled = logits.to(at::kFloat) / options.temperature;
  if (options.top_k > 0 && options.top_k < scaled.size(-1)) {
    const auto least = std::get<0>(at::topk(scaled, options.top_k, -1)).select(-1, options.top_k - 1);
    scaled.masked_fill_(scaled < least.unsqueeze(-1), -std::numeric_limits<double>::infinity());
  }
  const auto probabilities = scaled.softmax(-1);
  if (options.top_p == 1) {
    return probabilities;
  }
  auto [sorted, order] = probabilities.sort(-1, /*descending=*/true);
  const auto before = sorted.cumsum(-1) - sorted;
  sorted.masked_fill_(before >= options.top_p, 0);
  return at::zeros_like(probabilities).scatter_(-1, order, sorted / sorted.sum(-1, /*keepdim=*/true));
}

std::vector<std::vector<int32_t>> generate(Decoder& model, const std::vector<std::vector<int32_t>>& prompts,
                                           const GenerateOptions& options) {
  const c10::InferenceMode inference;
  const auto ranks = is_sharded(model) ? dcp::RankSync::all() : dcp::RankSync();
  check_arguments(model->config, prompts, options, ranks);
  const at::Device device = model->embed_tokens->weight.device();
  const auto padded = pad(prompts, device);
  KeyValueCache cache(padded.ids.size(1) + options.max_new_tokens - 1);
  Chooser chooser(options, prompts.size());
  std::vector<std::vector<int32_t>> texts(prompts.size());
  std::vector<bool> has_ended(prompts.size(), false);
  auto logits = model->forward(padded.ids, {.segment_ids = padded.segment_ids, .cache = &cache, .logits_to_keep = 1});
  while (true) {
    auto tokens = chooser.choose((is_dtensor(logits) ? full_tensor(logits) : logits).select(1, 0));
    ranks.broadcast_from_rank0(tokens);  // logits may differ in their last bits between different machines
    for (size_t text = 0; text < texts.size(); ++text) {
      if (!has_ended[text]) {
        const auto token = static_cast<int32_t>(tokens[text]);
        texts[text].push_back(token);
        has_ended[text] = std::ranges::find(options.stop_tokens, token) != options.stop_tokens.end();
        if (options.on_token) {
          options.on_token(text, token);
        }
      }
    }
    if (std::ranges::find(has_ended, false) == has_ended.end() || cache.length() == cache.capacity()) {
      return texts;
    }
    logits = model->forward(at::tensor(tokens, at::kLong).unsqueeze(1).to(device), {.cache = &cache});
  }
}

GenerateOptions read_generation_options(const std::string& folder) {
  std::string file = folder + "/generation_config.json";
  if (!std::filesystem::exists(file)) {
    file = folder + "/config.json";
  }
  const auto config = parse_config_object(read_config_text(file), file);
  KeyReader reader(config, file + ": ");
  GenerateOptions options{.stop_tokens = read_stop_tokens(reader)};
  options.max_new_tokens = reader.find_integer("max_new_tokens").value_or(options.max_new_tokens);
  if (reader.boolean("do_sample", false)) {
    options.temperature = reader.find_number("temperature").value_or(1);
    options.top_k = reader.find_integer("top_k", 0).value_or(kDefaultTopK);
    options.top_p = reader.find_number("top_p").value_or(1);
  }
  check_options(options);
  return options;
}

}  // namespace tessera::models
