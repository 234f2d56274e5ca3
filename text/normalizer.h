#pragma once
// What is done to a text before it is split.

#include <functional>
#include <string>
#include <vector>

#include "text/json_view.h"

namespace tessera::text {

/// A part of a text on its way to a model.
struct Normalized {
  std::string text;
  /// The first character comes from the first one of all the text, by which Metaspace knows where to prepend.
  bool at_start = false;
};

/// Changes a part, valid UTF-8. Threads may call one at the same time.
using Normalizer = std::function<void(Normalized& part)>;

/// Reads the "normalizer" of a file. Throws NotImplementedError for types other than NFC, NFD, NFKC, NFKD, Lowercase,
/// Strip, StripAccents, Prepend, Replace, ByteLevel and Sequence.
std::vector<Normalizer> parse_normalizers(const JsonView& json);

}  // namespace tessera::text
