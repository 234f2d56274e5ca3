#include "text/unicode.h"

#include <utf8proc.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "base/error.h"

namespace tessera::text {

namespace {

/// Returns whether `second` may follow `first`. After some first bytes the range is narrower (no overlong forms,
/// surrogates, or values above U+10FFFF).
bool may_follow(unsigned char first, unsigned char second) {
  switch (first) {
    case 0xE0:
      return second >= 0xA0 && second <= 0xBF;
    case 0xED:
      return second >= 0x80 && second <= 0x9F;
    case 0xF0:
      return second >= 0x90 && second <= 0xBF;
    case 0xF4:
      return second >= 0x80 && second <= 0x8F;
    default:
      return (second & 0xC0) == 0x80;
  }
}

struct FreeMalloced {
  void operator()(void* memory) const { std::free(memory); }
};

/// Returns the first character that may change; all smaller ones keep their form and do not combine with the previous
/// one.
char32_t first_unstable(NormalForm form) {
  switch (form) {
    case NormalForm::kNfc:
      return 0x300;
    case NormalForm::kNfd:
      return 0xC0;
    default:
      return 0xA0;
  }
}

int utf8proc_options(NormalForm form) {
  const bool composes = form == NormalForm::kNfc || form == NormalForm::kNfkc;
  const bool compatible = form == NormalForm::kNfkc || form == NormalForm::kNfkd;
  return UTF8PROC_STABLE | (composes ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) | (compatible ? UTF8PROC_COMPAT : 0);
}

void append_normalized(std::string& out, std::string_view text, NormalForm form) {
  utf8proc_uint8_t* made = nullptr;
  const auto length =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
                   &made, static_cast<utf8proc_option_t>(utf8proc_options(form)));
  TESSERA_CHECK(ValueError, length >= 0, "normalizing {} bytes of text: {}", text.size(), utf8proc_errmsg(length));
  const std::unique_ptr<utf8proc_uint8_t, FreeMalloced> owner(made);
  out.append(reinterpret_cast<const char*>(made), static_cast<size_t>(length));
}

/// Maps characters below U+0144 to bytes, -1 if there is none.
std::array<int, 0x144> make_bytes_of_characters() {
  std::array<int, 0x144> bytes;
  bytes.fill(-1);
  for (int byte = 0; byte < 256; ++byte) {
    bytes[byte_character(static_cast<unsigned char>(byte))] = byte;
  }
  return bytes;
}

std::array<char32_t, 256> make_byte_characters() {
  std::array<char32_t, 256> characters;
  char32_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool is_visible = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    characters[byte] = is_visible ? static_cast<char32_t>(byte) : next++;
  }
  return characters;
}

}  // namespace

Utf8Head utf8_head(std::string_view bytes) {
  using Kind = Utf8Head::Kind;
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(bytes[i]); };
  if (byte(0) < 0x80) {
    return {Kind::kCharacter, 1};
  }
  if (byte(0) < 0xC2 || byte(0) > 0xF4) {
    return {Kind::kInvalid, 1};
  }
  const size_t length = utf8_length(bytes[0]);
  for (size_t i = 1; i < length; ++i) {
    if (i == bytes.size()) {
      return {Kind::kIncomplete, i};
    }
    if (i == 1 ? !may_follow(byte(0), byte(1)) : (byte(i) & 0xC0) != 0x80) {
      return {Kind::kInvalid, i};
    }
  }
  return {Kind::kCharacter, length};
}

size_t valid_utf8_prefix(std::string_view bytes) {
  constexpr uint64_t kHighBits = 0x8080808080808080;
  size_t at = 0;
  while (at < bytes.size()) {
    uint64_t eight = kHighBits;
    if (at + sizeof eight <= bytes.size()) {
      std::memcpy(&eight, bytes.data() + at, sizeof eight);
    }
    if ((eight & kHighBits) == 0) {
      at += sizeof eight;
      continue;
    }
    const auto head = utf8_head(bytes.substr(at));
    if (head.kind != Utf8Head::Kind::kCharacter) {
      break;
    }
    at += head.bytes;
  }
  return at;
}

size_t append_repaired(std::string& text, std::string_view bytes) {
  while (true) {
    const size_t valid = valid_utf8_prefix(bytes);
    text += bytes.substr(0, valid);
    bytes.remove_prefix(valid);
    if (bytes.empty()) {
      return 0;
    }
    const auto head = utf8_head(bytes);
    if (head.kind == Utf8Head::Kind::kIncomplete) {
      return head.bytes;
    }
    text += kReplacement;
    bytes.remove_prefix(head.bytes);
  }
}

void append_utf8(std::string& text, char32_t character) {
  utf8proc_uint8_t bytes[4];
  const auto length = utf8proc_encode_char(static_cast<utf8proc_int32_t>(character), bytes);
  text.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(length));
}

bool is_whitespace(char32_t character) {
  if (character <= 0x85) {
    return character == ' ' || (character >= '\t' && character <= '\r') || character == 0x85;
  }
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(character));
  return category == UTF8PROC_CATEGORY_ZS || category == UTF8PROC_CATEGORY_ZL || category == UTF8PROC_CATEGORY_ZP;
}

bool is_numeric(char32_t character) {
  if (character < 0x80) {
    return character >= '0' && character <= '9';
  }
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(character));
  return category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO;
}

bool is_punctuation(char32_t character) {
  if (character < 0x80) {
    return (character >= '!' && character <= '/') || (character >= ':' && character <= '@') ||
           (character >= '[' && character <= '`') || (character >= '{' && character <= '~');
  }
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(character));
  return category >= UTF8PROC_CATEGORY_PC && category <= UTF8PROC_CATEGORY_PO;
}

bool is_mark(char32_t character) {
  if (character < 0x300) {
    return false;
  }
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(character));
  return category >= UTF8PROC_CATEGORY_MN && category <= UTF8PROC_CATEGORY_ME;
}

size_t leading_whitespace(std::string_view text) {
  size_t length = 0;
  while (length < text.size() && is_whitespace(decode_utf8(text.data() + length))) {
    length += utf8_length(text[length]);
  }
  return length;
}

size_t trailing_whitespace(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    const size_t start = last_character(text.substr(0, end));
    if (!is_whitespace(decode_utf8(text.data() + start))) {
      break;
    }
    end = start;
  }
  return text.size() - end;
}

void append_lower_case(std::string& text, char32_t character) {
  if (character < 0x80) {
    text += static_cast<char>(character >= 'A' && character <= 'Z' ? character + ('a' - 'A') : character);
  } else if (character == 0x130) {
    text += "i\xCC\x87";
  } else {
    append_utf8(text, static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(character))));
  }
}

// A character from the first unstable one on may change, and may combine with the previous one. Only runs of such
// characters, with the preceding one, are passed to utf8proc.
std::string normal_form(std::string_view text, NormalForm form) {
  const char32_t unstable = first_unstable(form);
  std::string out;
  out.reserve(text.size());
  size_t done = 0, previous = 0;
  for (size_t at = 0; at < text.size();) {
    if (decode_utf8(text.data() + at) < unstable) {
      previous = at;
      at += utf8_length(text[at]);
      continue;
    }
    out += text.substr(done, previous - done);
    while (at < text.size() && decode_utf8(text.data() + at) >= unstable) {
      at += utf8_length(text[at]);
    }
    append_normalized(out, text.substr(previous, at - previous), form);
    done = previous = at;
  }
  return out += text.substr(done);
}

char32_t byte_character(unsigned char byte) {
  static const auto characters = make_byte_characters();
  return characters[byte];
}

void append_byte_characters(std::string& text, std::string_view bytes) {
  for (const char byte : bytes) {
    append_utf8(text, byte_character(static_cast<unsigned char>(byte)));
  }
}

bool append_bytes_of_characters(std::string& bytes, std::string_view text) {
  static const auto bytes_of_characters = make_bytes_of_characters();
  const size_t before = bytes.size();
  for (size_t at = 0; at < text.size(); at += utf8_length(text[at])) {
    const char32_t character = decode_utf8(text.data() + at);
    const int byte = character < bytes_of_characters.size() ? bytes_of_characters[character] : -1;
    if (byte < 0) {
      bytes.resize(before);
      return false;
    }
    bytes += static_cast<char>(byte);
  }
  return true;
}

}  // namespace tessera::text
