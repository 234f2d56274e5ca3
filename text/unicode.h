#pragma once
// UTF-8 decoding, and character properties from utf8proc's tables.

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera::text {

/// Start of a byte string: a character, bytes that cannot start one, or a truncated character.
struct Utf8Head {
  enum class Kind { kCharacter, kInvalid, kIncomplete };
  Kind kind = Kind::kCharacter;
  /// For kInvalid, the number of bytes that one U+FFFD replaces, in Python and in Unicode's recommendation.
  size_t bytes = 1;
};

/// Classifies the start of `bytes`, which must not be empty.
Utf8Head utf8_head(std::string_view bytes);

/// Returns the length in bytes of the longest valid UTF-8 prefix.
size_t valid_utf8_prefix(std::string_view bytes);

/// Appends `bytes` as UTF-8, with U+FFFD for invalid bytes, like Python's decode(errors="replace"). Omits bytes at the
/// end that may start a character, and returns their number.
size_t append_repaired(std::string& text, std::string_view bytes);

inline constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

/// Returns the number of bytes of the character with first byte `first`, in valid UTF-8.
inline size_t utf8_length(char first) {
  const auto byte = static_cast<unsigned char>(first);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

/// Returns the first character of `text`, which must be valid UTF-8.
inline char32_t decode_utf8(const char* text) {
  const auto byte = [&](int i) { return static_cast<char32_t>(static_cast<unsigned char>(text[i])); };
  switch (utf8_length(*text)) {
    case 1:
      return byte(0);
    case 2:
      return (byte(0) & 0x1F) << 6 | (byte(1) & 0x3F);
    case 3:
      return (byte(0) & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F);
    default:
      return (byte(0) & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F);
  }
}

/// Returns the offset of the last character of `text`, which must not be empty.
inline size_t last_character(std::string_view text) {
  size_t at = text.size() - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) {
    --at;
  }
  return at;
}

/// Calls use(character, offset, bytes) for each character of valid UTF-8.
template <class Use>
void for_each_character(std::string_view text, Use use) {
  for (size_t at = 0; at < text.size();) {
    const size_t bytes = utf8_length(text[at]);
    use(decode_utf8(text.data() + at), at, bytes);
    at += bytes;
  }
}

void append_utf8(std::string& text, char32_t character);

/// Return whether a character has Unicode's White_Space property, a numeric category (N), is punctuation (P, or
/// ASCII's), or is a mark (M).
bool is_whitespace(char32_t character);
bool is_numeric(char32_t character);
bool is_punctuation(char32_t character);
bool is_mark(char32_t character);

/// Return the length in bytes of the leading or trailing whitespace of `text`.
size_t leading_whitespace(std::string_view text);
size_t trailing_whitespace(std::string_view text);

/// Appends the lower case of a character, which is one character except for U+0130 (two).
void append_lower_case(std::string& text, char32_t character);

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };

/// Returns `text`, which must be valid UTF-8, in a normal form.
std::string normal_form(std::string_view text, NormalForm form);

/// Returns GPT-2's visible character for a byte: itself if it is printable Latin-1, otherwise one from U+0100 on.
char32_t byte_character(unsigned char byte);

/// Appends byte_character() of each byte.
void append_byte_characters(std::string& text, std::string_view bytes);

/// Appends the bytes that the characters represent. Returns false, without appending, if a character represents none.
bool append_bytes_of_characters(std::string& bytes, std::string_view text);

}  // namespace tessera::text
