#pragma once
// Writes JSON text directly: a tree of nodes would be slow for a checkpoint's many keys. Internal to this package and
// to others that parse JSON of Hugging Face folders.

#include <string>
#include <string_view>

#include "checkpoint/format/shard_slice.h"

namespace tessera::dcp {

void append_json(std::string& out, std::string_view text);     // as a string; ValueError if not UTF-8
void append_json_key(std::string& out, std::string_view key);  // `"key":`
void append_json(std::string& out, const Sizes& numbers);      // `[1,2]`

/// Throws CheckpointError that names `file` if objects and lists nest more than `most` deep. Called before the parser,
/// which would take a callback for this, but then looks through all members of an object each time one of them ends
/// (nlohmann/json#5457).
void check_json_depth(std::string_view text, const std::string& file, int most);

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
