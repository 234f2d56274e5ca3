#pragma once
// Tokens that are found in a text before a model sees it.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/json_view.h"
#include "text/pattern.h"

namespace tessera::text {

/// An element of a file's "added_tokens".
struct AddedToken {
  int32_t id = 0;
  std::string content;
  /// Not where a letter or digit is beside it.
  bool single_word = false;
  /// Takes the whitespace before and after it.
  bool lstrip = false;
  bool rstrip = false;
  /// Is looked for, normalized, in the normalized text.
  bool normalized = false;
  /// Is left out of decoded text on request.
  bool special = false;
};

AddedToken parse_added_token(const JsonView& json);

/// An immutable set of tokens to find. Threads may use one at the same time.
class AddedTokenFinder {
 public:
  /// A part of a text: of `id` if it is a token.
  struct Part {
    Range range;
    std::optional<int32_t> id;
  };

  AddedTokenFinder();

  /// `text` is what is looked for. Call finish() after the last one.
  void add(const AddedToken& token, std::string text);
  void finish();

  /// Returns the parts of a text from left to right. Of the tokens at a place the longest counts. Python's order of
  /// things is kept: a token next to one that takes whitespace may have some of the same.
  std::vector<Part> split(std::string_view text) const;

 private:
  struct Entry {
    std::string text;
    AddedToken token;
  };

  const Entry* longest_at(std::string_view text) const;
  bool is_single_word(std::string_view text, Range match) const;

  std::vector<Entry> entries_;  // sorted by text
  std::array<bool, 256> is_first_byte_{};
  Pattern word_;
};

}  // namespace tessera::text
