#pragma once
// A tiny random model, so that finetune can be tried without a download.

#include <string>

namespace tessera::examples {

/// Writes a folder in Hugging Face format: a Llama with some 400,000 random parameters, where each token is a byte.
void write_tiny_llama(const std::string& folder);

}  // namespace tessera::examples
