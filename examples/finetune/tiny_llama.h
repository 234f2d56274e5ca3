#pragma once
// A tiny random model, so that finetune can be tried without a download.

#include <string>

namespace tessera::examples {

/// Writes a folder as Hugging Face publishes them: a Llama of some 400,000 random parameters whose tokens are bytes.
void write_tiny_llama(const std::string& folder);

}  // namespace tessera::examples
