#pragma once
// From tokens back to text.

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/json_view.h"

namespace tessera::text {

/// Takes tokens, each in parts, and gives the next one its own. What it gives does not depend on how the tokens come in
/// parts, so that a stream of tokens gives the text of all of them.
class DecodeStep {
 public:
  virtual ~DecodeStep() = default;
  /// Takes whole characters of a token.
  virtual void take(std::string_view part) = 0;
  virtual void end_token() = 0;
  /// Gives what is held, as there are no more tokens, and starts anew.
  virtual void finish() = 0;
};

/// Makes a step that gives to `next`, which outlives it.
using MakeDecodeStep = std::function<std::unique_ptr<DecodeStep>(DecodeStep& next)>;

/// Reads the "decoder" of a file, the first step first. Throws NotImplementedError for types other than ByteLevel,
/// ByteFallback, Fuse, Strip, Replace, Metaspace and Sequence.
std::vector<MakeDecodeStep> parse_decoders(const JsonView& json);

/// A stream of tokens that become text. One thread at a time.
class Decoding {
 public:
  /// Without steps, the text is the tokens with spaces between them.
  explicit Decoding(const std::vector<MakeDecodeStep>& make_steps);
  ~Decoding();
  Decoding(Decoding&&) noexcept;
  Decoding& operator=(Decoding&&) noexcept;

  void take(std::string_view token);
  /// There are no more tokens; then starts anew.
  void finish();
  /// Returns the text that has come since the last call: whole characters.
  std::string text();

 private:
  class End;

  std::unique_ptr<End> end_;
  std::vector<std::unique_ptr<DecodeStep>> steps_;  // from the last to the first
  DecodeStep* first_ = nullptr;
};

}  // namespace tessera::text
