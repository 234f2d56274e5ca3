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
  std::vector<int32_t> stop_tokens = {};  // any of them ends a text and is included in it
  double temperature = 0;                 // divisor of logits; 0: always the most likely token
  int64_t top_k = 0;                      // sample from this number of most likely tokens; 0: from all
  double top_p = 1;                       // sample from the fewest tokens with this total probability
  uint64_t seed = 0;                      // text i has a separate random stream, determined by seed and i
  std::function<void(size_t text, int32_t token)> on_token = {};  // called for each new token, on each rank
};

/// Returns the new tokens of each prompt. Prompts of any lengths are processed together, with a KV cache. For a sharded
/// model, all ranks must call it with the same arguments, and all get the same tokens, chosen by rank 0 of the default
/// group. Throws ValueError without prompts, for an empty prompt, ids outside the vocabulary, options out of range, and
/// too few learned positions; on every rank if ranks differ.
std::vector<std::vector<int32_t>> generate(Decoder& model, const std::vector<std::vector<int32_t>>& prompts,
                                           const GenerateOptions& options = {});

/// Returns the probabilities [..., vocab] from which generate samples, in float32, for logits [..., vocab]. The
/// temperature must be above 0.
at::Tensor sampling_probabilities(const at::Tensor& logits, const GenerateOptions& options);

/// Reads these options, with eos_token_id as the stop tokens, from the folder's generation_config.json, or without one
/// from its config.json. Samples only if "do_sample" is true. Throws CheckpointError if a file cannot be read, and
/// ValueError, with the key, for values of another type or out of range.
GenerateOptions read_generation_options(const std::string& folder);

}  // namespace tessera::models
