#pragma once
// Continues texts with a decoder, token by token.
//
//   auto options = models::read_generation_options("llama");              // generation_config.json: stop tokens, top_p
//   options.max_new_tokens = 50;
//   auto texts = models::generate(model, {tokenizer.encode("Once upon a time")}, options);
//   tokenizer.decode(texts[0]);

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "models/decoder.h"

namespace tessera::models {

struct GenerateOptions {
  int64_t max_new_tokens = 128;
  std::vector<int32_t> stop_tokens = {};  // any of them ends a text, and is part of it
  double temperature = 0;                 // 0: always the most likely token; else divides logits
  int64_t top_k = 0;                      // draws from so many most likely tokens; 0: from all
  double top_p = 1;                       // draws from the fewest tokens that have this probability together
  uint64_t seed = 0;                      // text i draws from a stream of its own, by seed and i
  std::function<void(size_t text, int32_t token)> on_token = {};  // called for each new token, on each rank
};

/// Returns the new tokens of each prompt, in as many texts. Prompts, of any lengths, are computed together, with a KV
/// cache. Of a sharded model all ranks must call it with the same arguments, and all get the same tokens, which rank 0
/// of the default group chooses. Throws ValueError for no prompts, an empty one, ids outside of the vocabulary, options
/// outside of their range, and learned positions that do not suffice; on every rank if ranks differ.
std::vector<std::vector<int32_t>> generate(Decoder& model, const std::vector<std::vector<int32_t>>& prompts,
                                           const GenerateOptions& options = {});

/// Returns the probabilities [..., vocab] that generate draws from, in float32, for logits [..., vocab]. The
/// temperature must be above 0.
at::Tensor sampling_probabilities(const at::Tensor& logits, const GenerateOptions& options);

/// Returns what the folder's generation_config.json says, or where there is none its config.json, of these options and
/// eos_token_id, the stop tokens. Draws only if "do_sample" is true. Throws CheckpointError if a file cannot be read
/// and ValueError, with the key, for values of another type or range.
GenerateOptions read_generation_options(const std::string& folder);

}  // namespace tessera::models
