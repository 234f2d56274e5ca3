#pragma once
// Serializes integers and strings for ranks of the same build. Internal to this package.
//
//   append_field(text, 3); append_field(text, "a b");  // " 3 3 a b"
//   FieldReader reader(text); reader.number();         // 3

#include <cstdint>
#include <string>
#include <string_view>

#include "checkpoint/format/shard_slice.h"

namespace tessera::dcp {

void append_field(std::string& out, int64_t number);
void append_field(std::string& out, std::string_view text);
void append_field(std::string& out, const Sizes& numbers);

/// Reads fields in the order in which they were appended. Anything else is an AssertionError.
class FieldReader {
 public:
  explicit FieldReader(std::string_view text) : rest_(text) {}  // `text` must outlive it

  bool at_end() const { return rest_.empty(); }
  int64_t number();
  std::string_view text();
  Sizes numbers();

 private:
  std::string_view rest_;
};

}  // namespace tessera::dcp
