#pragma once
// How a text is split into the words that a model tokenizes one by one.

#include <functional>
#include <string_view>
#include <vector>

#include "text/json_view.h"

namespace tessera::text {

struct Piece {
  std::string_view text;
  /// As Normalized::at_start.
  bool at_start = false;
};

/// Takes pieces, which live during the call, from left to right. None is empty.
class PieceSink {
 public:
  virtual ~PieceSink() = default;
  virtual void take(const Piece& piece) = 0;
};

/// Gives `sink` the parts of a piece. Threads may call one at the same time.
using PreTokenizer = std::function<void(const Piece& piece, PieceSink& sink)>;

struct PreTokenizers {
  std::vector<PreTokenizer> steps;
  /// The last one is ByteLevel. Words then come as the bytes whose visible characters the model knows, which saves
  /// writing these.
  bool gives_bytes = false;
};

/// Reads the "pre_tokenizer" of a file. Throws NotImplementedError for types other than ByteLevel, Split, Whitespace,
/// WhitespaceSplit, Digits, Punctuation, Metaspace and Sequence.
PreTokenizers parse_pre_tokenizers(const JsonView& json);

/// Gives `sink` what `steps`, one after the other, make of a piece.
void pre_tokenize(const PreTokenizers& pre_tokenizers, const Piece& piece, PieceSink& sink);

}  // namespace tessera::text
