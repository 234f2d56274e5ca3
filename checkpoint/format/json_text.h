#pragma once
// JSON as text, put together piece by piece: what a checkpoint has for each of its many names is not worth a tree of
// nodes that is written once. Internal to this package.

#include <string>
#include <string_view>

#include "checkpoint/format/box.h"

namespace tessera::dcp {

/// Appends `text` as a string. Throws ValueError where it is not UTF-8.
void append_json(std::string& out, std::string_view text);
/// Appends `"key":`.
void append_json_key(std::string& out, std::string_view key);
/// Appends `[1,2]`.
void append_json(std::string& out, const Sizes& numbers);

/// Appends `open`, what `append` appends for each item, with commas between, and `close`.
template <class Items, class Append>
void append_json_list(std::string& out, char open, Items&& items, char close, Append append) {
  out += open;
  bool is_first = true;
  for (const auto& item : items) {
    if (!is_first) {
      out += ',';
    }
    is_first = false;
    append(item);
  }
  out += close;
}

}  // namespace tessera::dcp
