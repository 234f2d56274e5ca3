#include "checkpoint/format/json_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "checkpoint/format/checkpoint_error.h"

namespace tessera::dcp {

void append_json(std::string& out, std::string_view text) {
  const bool is_plain = std::ranges::all_of(text, [](char c) { return c >= ' ' && c <= '~' && c != '"' && c != '\\'; });
  if (is_plain) {
    out += '"';
    out += text;
    out += '"';
    return;
  }
  try {
    out += nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception& error) {
    throw ValueError(fmt::format("checkpoint: names and texts must be UTF-8 ({})", error.what()));
  }
}

void check_json_depth(std::string_view text, const std::string& file, int most) {
  int depth = 0;
  bool is_in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (is_in_string) {
      i += c == '\\' ? 1 : 0;
      is_in_string = c != '"';
    } else if (c == '{' || c == '[') {
      TESSERA_CHECK(CheckpointError, ++depth <= most, "{}: nested more than {} deep", file, most);
    } else if (c == '}' || c == ']') {
      --depth;
    } else {
      is_in_string = c == '"';
    }
  }
}

void append_json_key(std::string& out, std::string_view key) {
  append_json(out, key);
  out += ':';
}

void append_json(std::string& out, const Sizes& numbers) {
  append_json_list(out, '[', numbers, ']',
                   [&](int64_t number) { fmt::format_to(std::back_inserter(out), "{}", number); });
}

}  // namespace tessera::dcp
