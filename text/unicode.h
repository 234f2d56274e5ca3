#pragma once
// UTF-8, and what characters are, by utf8proc's tables.

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera::text {

/// What bytes start with: a character, bytes that cannot start one, or the start of a character whose rest is missing.
struct Utf8Head {
  enum class Kind { kCharacter, kInvalid, kIncomplete };
  Kind kind = Kind::kCharacter;
  /// Of kInvalid: as many as one U+FFFD stands for, in Python as in Unicode's recommendation.
  size_t bytes = 1;
};

/// Classifies the start of `bytes`, which are not empty.
Utf8Head utf8_head(std::string_view bytes);

/// Returns how many bytes of `bytes` are valid UTF-8 before the first fault.
size_t valid_utf8_prefix(std::string_view bytes);

/// Appends `bytes` as UTF-8, with U+FFFD for what is invalid, as Python's decode(errors="replace"). Returns how many
/// bytes at the end may be the start of a character; they are left out.
size_t append_repaired(std::string& text, std::string_view bytes);

inline constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

/// Returns the number of bytes of the character that starts with `first`, in valid UTF-8.
inline size_t utf8_length(char first) {
  const auto byte = static_cast<unsigned char>(first);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

/// Returns the character at `text`, which is valid UTF-8.
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

/// Returns where the last character of `text`, not empty, starts.
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

/// Whether a character is of Unicode's White_Space, of a numeric category (N), of punctuation (P, or ASCII's), of a
/// mark's (M).
bool is_whitespace(char32_t character);
bool is_numeric(char32_t character);
bool is_punctuation(char32_t character);
bool is_mark(char32_t character);

/// Returns the lengths of the whitespace that `text` starts and ends with.
size_t leading_whitespace(std::string_view text);
size_t trailing_whitespace(std::string_view text);

/// Appends the lower case of a character, of which U+0130 alone has two characters.
void append_lower_case(std::string& text, char32_t character);

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };

/// Returns `text`, which is valid UTF-8, in a normal form.
std::string normal_form(std::string_view text, NormalForm form);

/// Returns the visible character by which GPT-2 writes a byte: itself if it is printable Latin-1, else one from U+0100.
char32_t byte_character(unsigned char byte);

/// Appends what byte_character() says of each byte.
void append_byte_characters(std::string& text, std::string_view bytes);

/// Appends the bytes that characters stand for. Returns false, and appends nothing, if one of them stands for none.
bool append_bytes_of_characters(std::string& bytes, std::string_view text);

}  // namespace tessera::text
