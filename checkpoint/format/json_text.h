#pragma once
// Writes JSON text directly: a tree of nodes would be slow for a checkpoint's many keys. Internal to this package.

#include <string>
#include <string_view>

#include "checkpoint/format/shard_slice.h"

namespace tessera::dcp {

void append_json(std::string& out, std::string_view text);     // as a string; ValueError if not UTF-8
void append_json_key(std::string& out, std::string_view key);  // `"key":`
void append_json(std::string& out, const Sizes& numbers);      // `[1,2]`

/// Appends `open`, the items as `append` writes them, separated by commas, and `close`.
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
