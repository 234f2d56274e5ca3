#pragma once
// Splits a text into words, which the model tokenizes one by one.

#include <functional>
#include <string_view>
#include <vector>

#include "text/json_view.h"

namespace tessera::text {

struct Piece {
  std::string_view text;
  /// See Normalized::at_start.
  bool at_start = false;
};

/// Receives nonempty pieces from left to right. A piece is valid only during the call.
class PieceSink {
 public:
  virtual ~PieceSink() = default;
  virtual void take(const Piece& piece) = 0;
};

/// Splits a piece and passes the parts to `sink`. Thread safety: threads may share it.
using PreTokenizer = std::function<void(const Piece& piece, PieceSink& sink)>;

struct PreTokenizers {
  std::vector<PreTokenizer> steps;
  /// Whether the last step is ByteLevel. Words are then raw bytes instead of their visible characters, which saves the
  /// conversion.
  bool gives_bytes = false;
};

/// Reads the "pre_tokenizer" of a file. Throws NotImplementedError for types other than ByteLevel, Split, Whitespace,
/// WhitespaceSplit, Digits, Punctuation, Metaspace and Sequence.
PreTokenizers parse_pre_tokenizers(const JsonView& json);

/// Applies all steps in order to a piece and passes the results to `sink`.
void pre_tokenize(const PreTokenizers& pre_tokenizers, const Piece& piece, PieceSink& sink);

}  // namespace tessera::text
