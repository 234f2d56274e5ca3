#pragma once
// Generates text byte by byte from the model's predictions.

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <string>

#include "examples/gpt_model.h"

namespace tessera::examples {

struct SampleOptions {
  std::string prompt;
  int64_t bytes = 400;
  /// Divisor of the logits: below 1 makes likely bytes likelier, above 1 less likely.
  double temperature = 0.8;
  uint64_t seed = 1;
  /// Device of the model.
  c10::DeviceType device = c10::DeviceType::CPU;
};

/// Returns bytes that continue the prompt, drawn on the CPU. With a sharded model, all ranks must call it with the same
/// options, and get the same text.
std::string sample_text(Gpt& model, const SampleOptions& options);

/// Returns `text` for a terminal: bytes other than printable ASCII, newline and tab become '?'.
std::string printable(const std::string& text);

}  // namespace tessera::examples
