#pragma once
// Normalizes a text before it is split.

#include <functional>
#include <string>
#include <vector>

#include "text/json_view.h"

namespace tessera::text {

/// Part of a text, to be normalized.
struct Normalized {
  std::string text;
  /// Whether the part starts with the text's first character, where Metaspace prepends.
  bool at_start = false;
};

/// Normalizes a part, which must be valid UTF-8. Thread safety: threads may share it.
using Normalizer = std::function<void(Normalized& part)>;

/// Reads the "normalizer" of a file. Throws NotImplementedError for types other than NFC, NFD, NFKC, NFKD, Lowercase,
/// Strip, StripAccents, Prepend, Replace, ByteLevel and Sequence.
std::vector<Normalizer> parse_normalizers(const JsonView& json);

}  // namespace tessera::text
