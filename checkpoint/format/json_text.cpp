#include "checkpoint/format/json_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>

#include "base/error.h"

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

void append_json_key(std::string& out, std::string_view key) {
  append_json(out, key);
  out += ':';
}

void append_json(std::string& out, const Sizes& numbers) {
  append_json_list(out, '[', numbers, ']',
                   [&](int64_t number) { fmt::format_to(std::back_inserter(out), "{}", number); });
}

}  // namespace tessera::dcp
