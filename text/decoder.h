#pragma once
// Converts tokens back to text.

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/json_view.h"

namespace tessera::text {

/// Transforms tokens, which arrive in parts, and passes the result to the next step. The result does not depend on how
/// tokens are divided, so streaming yields the same text as decoding all tokens at once.
class DecodeStep {
 public:
  virtual ~DecodeStep() = default;
  /// Takes a part of a token, which consists of whole characters.
  virtual void take(std::string_view part) = 0;
  virtual void end_token() = 0;
  /// Passes on any pending text at the end of the tokens, and resets the step.
  virtual void finish() = 0;
};

/// Makes a step that passes its results to `next`, which must outlive it.
using MakeDecodeStep = std::function<std::unique_ptr<DecodeStep>(DecodeStep& next)>;

/// Reads the "decoder" of a file as steps in order. Throws NotImplementedError for types other than ByteLevel,
/// ByteFallback, Fuse, Strip, Replace, Metaspace and Sequence.
std::vector<MakeDecodeStep> parse_decoders(const JsonView& json);

/// Stream that decodes tokens to text. Thread safety: one thread at a time.
class Decoding {
 public:
  /// Makes a stream. Without steps, it joins the tokens with spaces.
  explicit Decoding(const std::vector<MakeDecodeStep>& make_steps);
  ~Decoding();
  Decoding(Decoding&&) noexcept;
  Decoding& operator=(Decoding&&) noexcept;

  void take(std::string_view token);
  /// Ends the tokens and resets the stream.
  void finish();
  /// Returns the text, in whole characters, that became available since the last call.
  std::string text();

 private:
  class End;

  std::unique_ptr<End> end_;
  std::vector<std::unique_ptr<DecodeStep>> steps_;  // in reverse order
  DecodeStep* first_ = nullptr;
};

}  // namespace tessera::text
