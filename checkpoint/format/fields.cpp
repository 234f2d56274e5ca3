#include "checkpoint/format/fields.h"

#include <array>
#include <charconv>
#include <iterator>
#include <limits>

#include "base/error.h"

namespace tessera::dcp {

void append_field(std::string& out, int64_t number) {
  std::array<char, std::numeric_limits<int64_t>::digits10 + 3> digits;
  digits[0] = ' ';
  out.append(digits.data(), std::to_chars(digits.data() + 1, digits.data() + digits.size(), number).ptr);
}

void append_field(std::string& out, std::string_view text) {
  append_field(out, std::ssize(text));
  out += ' ';
  out += text;
}

void append_field(std::string& out, const Sizes& numbers) {
  append_field(out, std::ssize(numbers));
  for (const int64_t number : numbers) {
    append_field(out, number);
  }
}

int64_t FieldReader::number() {
  TESSERA_ASSERT(!rest_.empty(), "a number is missing");
  int64_t number = 0;
  const auto [end, error] = std::from_chars(rest_.data() + 1, rest_.data() + rest_.size(), number);
  TESSERA_ASSERT(error == std::errc(), "no number at '{}'", rest_.substr(0, 80));
  rest_.remove_prefix(static_cast<size_t>(end - rest_.data()));
  return number;
}

std::string_view FieldReader::text() {
  const auto length = static_cast<size_t>(number());
  TESSERA_ASSERT(length < rest_.size(), "a text of {} bytes, of which {} are there", length, rest_.size());
  const auto text = rest_.substr(1, length);
  rest_.remove_prefix(1 + length);
  return text;
}

Sizes FieldReader::numbers() {
  Sizes numbers(static_cast<size_t>(number()));
  for (int64_t& element : numbers) {
    element = number();
  }
  return numbers;
}

}  // namespace tessera::dcp
