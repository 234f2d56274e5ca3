#pragma once
// Finds added tokens in a text before the model tokenizes it.

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
  /// Matches only if no letter or digit is adjacent.
  bool single_word = false;
  /// Includes adjacent whitespace: lstrip on the left, rstrip on the right.
  bool lstrip = false;
  bool rstrip = false;
  /// Matches the normalized token in the normalized text.
  bool normalized = false;
  /// Can be omitted from decoded text.
  bool special = false;
};

AddedToken parse_added_token(const JsonView& json);

/// Immutable set of tokens to find. Thread safety: any number of threads may share it.
class AddedTokenFinder {
 public:
  /// Part of a text. `id` is set if the part is a token.
  struct Part {
    Range range;
    std::optional<int32_t> id;
  };

  AddedTokenFinder();

  /// Adds a token that is found as `text`. Call finish() after the last one.
  void add(const AddedToken& token, std::string text);
  void finish();

  /// Splits a text into parts from left to right. The longest token at a position wins. As in Python, a token next to
  /// one that strips whitespace may contain some of the same whitespace.
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
