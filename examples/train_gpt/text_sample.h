#pragma once
// Lets the model write: byte after byte, each drawn from what the model predicts.

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <string>

#include "examples/gpt_model.h"

namespace tessera::examples {

struct SampleOptions {
  std::string prompt;
  int64_t bytes = 400;
  /// Divides the logits: below 1 the likely bytes become likelier, above 1 less likely.
  double temperature = 0.8;
  uint64_t seed = 1;
  /// The model's.
  c10::DeviceType device = c10::DeviceType::CPU;
};

/// The bytes that the model goes on with after the prompt; they are drawn on the CPU, wherever the model lies. With a
/// sharded model every rank calls it with the same options and gets the same text.
std::string sample_text(Gpt& model, const SampleOptions& options);

/// `text` for a terminal: bytes other than printable ASCII, newline and tab become '?'.
std::string printable(const std::string& text);

}  // namespace tessera::examples
